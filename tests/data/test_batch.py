"""Steps: any split of the samples, at any position; batches on the device one by one; loading beside computing."""

import ast
import contextlib
import gc
import itertools
import os
import resource
import time
import weakref
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.cli import ROOT
from support.loaders import open_loader, whole
from support.sources import trees
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, default_collate

from trainer.config.options import DataOptions
from trainer.data.batch import Split, count_samples
from trainer.data.device_prefetch import Upload, map_tensors
from trainer.data.loader import Loader
from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index
from trainer.data.shards.reader import ShardReader
from trainer.data.shards.writer import write_shards
from trainer.data.source import MapReader, Samples
from trainer.errors import DataError

IN_PROCESS = DataOptions(workers=0, shuffle_shards=5, shuffle_window=4)
ABOVE = ("plan", "trainer", "callback", "callbacks", "recipe", "batch", "session", "validation", "checkpointing")


def test_data_imports_nothing_from_above():
    """Type-only imports count."""
    found = [tree for path, tree in trees("trainer").items() if path.is_relative_to(ROOT / "trainer" / "data")]
    assert found
    for tree in found:
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[:1] == ["trainer"] and name.split(".")[1] in ABOVE]


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_to_batches_without_a_trainer(workers, tmp_path):
    write_shards(({"__key__": f"{i:03d}", "npy": np.array([i])} for i in range(30)), tmp_path, "s", per_shard=8)
    index = Index.open(find_shards(str(tmp_path / "*.tar")))
    options = DataOptions(workers=workers, shuffle_shards=4, shuffle_window=4)

    def numbers(start: int, count: int) -> list[list[int]]:
        samples = Samples(ShardReader(index), index.counts, index.fingerprint, lambda sample, _: sample["npy"], seed=3)
        loader = Loader(
            samples,
            samples.order(options.shuffle_shards, options.shuffle_window),
            Split(6, accumulate=2),
            options,
            seed=3,
        )
        steps = [whole(step) for step in itertools.islice(loader.train(start), count)]
        loader.close()
        return [torch.cat(step.batches).flatten().tolist() for step in steps]

    straight = numbers(0, 10)
    assert sorted(itertools.chain(*straight[:5])) == sorted(itertools.chain(*straight[5:])) == list(range(30))
    assert straight[:5] != straight[5:]
    assert numbers(7 * 6, 3) == straight[7:]


class Numbers(Dataset):
    def __len__(self) -> int:
        return 35

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor([i])


class Recipe:
    def data(self, split: str) -> Any:
        return Numbers() if split == "train" else None


class Mixed(Recipe):
    def __init__(self, shards: Path) -> None:
        self.shards = shards

    def data(self, split: str) -> Any:
        return {str(self.shards / "a-*.tar"): 3, str(self.shards / "b-*.tar"): 1} if split == "train" else None

    def transform(self, sample: dict[str, Any], rng: Any) -> Any:
        return sample["npy"]


def replanned(position: int) -> Split:
    """Even at first; then 1:2:5; then 5:2:1 and other micro-batches. A test double of what measures the ranks."""
    if position < 2 * 24:
        return Split(24, 3, 2)
    return Split(24, (3, 6, 15), 3) if position < 5 * 24 else Split(24, (15, 6, 3), 1)


@pytest.mark.parametrize("mixed", [False, True])
def test_shares_that_change_during_a_run_move_no_sample_to_another_step(mixed, tmp_path):
    for prefix, count in (("a", 31), ("b", 17)) if mixed else ():
        write_shards(
            ({"__key__": f"{i:03d}", "npy": np.array([i])} for i in range(count)), tmp_path, prefix, per_shard=5
        )
    recipe = Mixed(tmp_path) if mixed else Recipe()
    ranks = [open_loader(recipe, rank, 3, options=IN_PROCESS, batch=24) for rank in range(3)]
    even = [[whole(step) for step in itertools.islice(loader.train(0), 8)] for loader in ranks]
    other = [[whole(step) for step in itertools.islice(loader.train(0, replanned), 8)] for loader in ranks]
    late = [[whole(step) for step in itertools.islice(loader.train(4 * 24, replanned), 4)] for loader in ranks]
    for step in range(8):
        assert {ref for rank in even for ref in rank[step].refs} == {ref for rank in other for ref in rank[step].refs}
        assert sum(len(rank[step].refs) for rank in other) == 24
        split = replanned(step * 24)
        for number, rank in enumerate(other):
            assert len(rank[step].refs) == split.share(number)
            assert rank[step].weights == [split.share(number) // split.accumulate] * split.accumulate
    for rank, resumed in zip(other, late, strict=True):
        for one, again in zip(rank[4:], resumed, strict=True):
            assert one.refs == again.refs and all(map(torch.equal, one.batches, again.batches))
    assert [rank[0].refs for rank in other] == [rank[0].refs for rank in even]  # the even split, and its bits
    assert [len(rank[3].refs) for rank in other] == [3, 6, 15]


@pytest.mark.parametrize(
    "wrong", [(24, (3, 6, 14), 1), (24, (1, 8, 15), 2), (24, 3, 0), (24, 3, (1, 2)), (24, 3, (1, 0, 2))]
)
def test_a_split_that_is_none_is_refused(wrong):
    with pytest.raises(AssertionError, match=r"^Split\("):
        Split(*wrong)


def test_ranks_may_have_different_numbers_of_micro_batches(monkeypatch):
    """The process that downloads ahead hears of steps, whatever their micro-batches."""
    passed: list[int] = []

    @contextlib.contextmanager
    def fetching(*_: Any) -> Iterator[Any]:
        yield lambda: passed.append(1)

    monkeypatch.setattr("trainer.data.loader.fetching", fetching)
    split = Split(24, (3, 6, 15), (1, 2, 5))
    assert split.micro == 3
    for rank, weights in enumerate(([3], [3, 3], [3] * 5)):
        loader = open_loader(Recipe(), rank, 3, options=IN_PROCESS, batch=24)
        passed.clear()
        for number, step in enumerate(itertools.islice(loader.train(0, lambda _: split), 4), start=1):
            assert step.weights == weights and len(passed) == number


class Batches:
    """An iterable whose batches are numbered."""

    def data(self, split: str) -> Any:
        return [torch.full((3, 1), float(i)) for i in range(100)] if split == "train" else None


def test_an_iterable_goes_on_behind_the_micro_batches_of_all_steps_before():
    def split_at(position: int) -> Split:
        return Split(6, 1, 2) if position < 12 else Split(9, 1, 3)

    loader = open_loader(Batches(), options=IN_PROCESS, batch=6, accumulate=2)
    straight = [whole(step).batches for step in itertools.islice(loader.train(0, split_at), 5)]
    assert [int(batch[0]) for batches in straight for batch in batches] == list(range(13))
    again = whole(next(loader.train(21, split_at))).batches
    assert [int(batch[0]) for batch in again] == [7, 8, 9]


class Memory(Recipe):
    """Its micro-batches are told from all other tensors by their width."""

    def collate(self, samples: list[Tensor]) -> Tensor:
        return default_collate(samples).float().expand(-1, 77).contiguous()


class ToMeta(Upload):
    """Copies to another device than the host, on which tensors can be counted."""

    def begin(self) -> None:
        if not self.begun:
            self.batch, self.begun = map_tensors(self.batch, lambda tensor: tensor.to("meta")), True

    def wait(self) -> Any:
        self.begin()
        return self.batch


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Those of before are not gone through at each count."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def alive(device: str) -> int:
    gc.collect()
    return sum(
        1
        for each in gc.get_objects()
        if type(each) is Tensor and each.shape[1:] == (77,) and each.device.type == device
    )


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_two_micro_batches_are_on_the_device_and_none_of_a_step_before(workers, few_objects, monkeypatch):
    loader = open_loader(Memory(), options=DataOptions(workers=workers), batch=24, accumulate=8)
    monkeypatch.setattr("trainer.data.batch.Upload", ToMeta)
    monkeypatch.setattr("trainer.data.loader.Upload", ToMeta)
    loader.stream = object()  # stands for CUDA's
    first = None
    for number, step in enumerate(itertools.islice(loader.train(0), 4)):
        assert alive("meta") <= 1 and step.weights == [3] * 8
        if number == 0:
            assert step.peek().shape == (3, 77)
        for batch, weight in step:
            assert weight == 3 and batch.device.type == "meta"
            first = first or weakref.ref(batch)
            assert alive("meta") <= 2
            del batch
        assert alive("meta") <= 1  # the first of the next step
    assert first and first() is None
    loader.close()


class Stream(Recipe):
    """The same as an iterable of batches."""

    def data(self, split: str) -> Any:
        return iter(lambda: torch.zeros(3, 77), None) if split == "train" else None


@pytest.mark.parametrize("recipe", [Memory(), pytest.param(Stream(), marks=pytest.mark.slow)])
def test_on_a_cpu_no_batch_of_a_step_before_is_kept(recipe, few_objects):
    loader = open_loader(recipe, options=DataOptions(workers=0), batch=24, accumulate=8)
    first = None
    for step in itertools.islice(loader.train(0), 3):
        assert alive("cpu") <= 8 + 1 and (first is None or first() is None)
        for n, (batch, _) in enumerate(step):
            assert len(batch) == 3 and alive("cpu") <= 8 - n + 1
            first = first or weakref.ref(batch)
            del batch
    loader.close()


def test_memory_is_pinned_before_it_is_copied(monkeypatch):
    """From other memory the copy would block the host: an iterable's batches come so."""
    pinned = list[Tensor]()
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    upload: Any = Upload([torch.ones(3), torch.ones(2)], SimpleNamespace(device=torch.device("meta")))  # pyright: ignore[reportArgumentType]
    assert [t.device.type for t in map_tensors(upload.batch, upload._copy)] == ["meta"] * 2
    assert [len(t) for t in pinned] == [3, 2]  # of a tensor that is pinned, torch returns itself


def test_all_validations_are_uploaded_on_one_stream(monkeypatch):
    """torch's allocator keeps memory for each stream."""
    streams = list[Any]()
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: object())
    monkeypatch.setattr("trainer.data.loader.upload", lambda micros, stream: streams.append(stream))
    numbers = Samples(MapReader(Numbers(), 1), [1] * 35, "", None, seed=0)
    loader = Loader(
        numbers, numbers.order(4, 4), Split(6), IN_PROCESS, validation=numbers, device=torch.device("cuda", 0)
    )
    for _ in range(3):
        loader.validate()
    assert streams == [loader.stream] * 3


class Slow(Dataset):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, i: int) -> Tensor:
        time.sleep(0.06)
        return torch.tensor([i])


class SlowRecipe:
    def data(self, split: str) -> Any:
        return Slow() if split == "train" else None


def seconds_a_step(steps: Iterator[Any], count: int) -> float:
    """From the third step on: before it, the workers have not loaded ahead."""
    for _ in range(2):
        whole(next(steps))
    began = time.monotonic()
    for step in itertools.islice(steps, count):
        for _ in step:
            time.sleep(0.04)
    return (time.monotonic() - began) / count


@pytest.mark.slow
@pytest.mark.parametrize("plan", [8, 1])
def test_loading_is_hidden_by_computing_under_accumulation(plan: int):
    """8 micro-batches: loading takes 0.24 s with 2 workers, computing 0.32 s. One after the other they are 1.75 times
    as long as computing; with 2 micro-batches ahead, 1.5 times. If the plan has 1 micro-batch, a callback's split has
    8."""
    loader = open_loader(SlowRecipe(), options=DataOptions(workers=2, prefetch=1), batch=8, accumulate=plan)
    steps = loader.train(0, lambda _: Split(8, 1, 8))
    times = [seconds_a_step(steps, 4) / (8 * 0.04) for _ in range(3)]
    loader.close()
    assert min(times) < 1.35  # the machine may be busy


def test_micro_batches_ahead_may_be_more_than_the_usual_limit_of_open_files():
    """A worker keeps a file open for each tensor that nobody has received, and a rank for each that it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, hard))
    try:
        loader = open_loader(Recipe(), options=DataOptions(workers=1, shuffle_shards=5), batch=200, accumulate=200)
        assert [len(step.weights) for step in itertools.islice(loader.train(0), 2)] == [200, 200]
        loader.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(3, 2), 3),
        ({"a": torch.zeros(4), "b": torch.zeros(9)}, 4),
        (UserDict(a=torch.zeros(6)), 6),
        ([(torch.zeros(5),), torch.zeros(2)], 5),
        (pack_sequence([torch.zeros(4, 2), torch.zeros(1, 2)]), 2),
        (default_collate([{"file": f"{i}.jpg", "x": torch.zeros(7, 2)} for i in range(3)]), 3),
        (default_collate([(f"{i}.jpg", torch.zeros(7, 2)) for i in range(3)]), 3),
    ],
)
def test_samples_are_counted_by_the_first_tensor(batch, samples):
    assert count_samples(batch) == samples


def image(number: int, channels: int = 3) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return an image of its own size, with a box for each of its objects."""
    return torch.zeros(channels, 5 + number, 7), {"boxes": torch.zeros(1 + number % 2, 4), "id": number}


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_samples_that_stay_objects_are_counted(size):
    samples = [image(i) for i in range(size)]
    named = [{"image": x, **target} for x, target in samples]
    masks = [(x, torch.zeros(6, 2)) for x, _ in samples]
    for batch in (tuple(zip(*samples, strict=True)), samples, named, masks, tuple(zip(*masks, strict=True))):
        assert count_samples(batch) == size
    images, targets = zip(*samples, strict=True)
    assert count_samples({"images": list(images), "targets": list(targets)}) == size


@pytest.mark.parametrize(
    "batch",
    [
        [[torch.zeros(4, 2), torch.zeros(4)], [torch.zeros(4), torch.zeros(4)]],  # collated pairs
        [[torch.zeros(4, 2), torch.zeros(4)], torch.zeros(9)],
        {"x": {"a": torch.zeros(4, 2)}, "edges": {"a": torch.zeros(2, 9)}},
        [[torch.zeros(4, 2), torch.zeros(4)], [torch.zeros(9, 2), torch.zeros(9)]],  # of two loaders, as FixMatch's
        [[torch.zeros(4, 2), torch.zeros(4, 2)], [torch.zeros(9, 2), torch.zeros(9, 2)]],
        [{"x": torch.zeros(4, 2), "y": torch.zeros(4)}, {"x": torch.zeros(9, 2), "y": torch.zeros(9)}],
    ],
)
def test_collated_tensors_have_a_row_for_each_sample(batch):
    assert count_samples(batch) == 4


@pytest.mark.parametrize("batch", ["text", [], {"a": "text"}, ("of a data set", torch.zeros(5), torch.zeros(5))])
def test_a_batch_without_tensors_needs_a_weight(batch):
    with pytest.raises(DataError, match=r"has no tensor to count samples by; let transform\(\) or collate\(\) make"):
        count_samples(batch)


def test_a_number_has_no_samples():
    with pytest.raises(DataError, match=r"^a batch begins with a tensor of shape \(\), which has no"):
        count_samples({"scale": torch.tensor(2.0), "x": torch.zeros(3)})
