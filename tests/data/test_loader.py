"""From an order to steps: planned samples in planned micro-batches, by any workers; validation weighed rightly."""

import contextlib
import itertools
import multiprocessing
import os
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.loaders import ACCUMULATE, BATCH, SEED, KeepBatches, small_loader, steps, whole
from support.quick import quick
from torch import Tensor
from torch.utils.data import Dataset
from toy_recipe import Points, Toy

from trainer.config.options import Options
from trainer.data.sampling.order import Order, Ref
from trainer.data.shards.reader import ShardReader
from trainer.data.shards.writer import write_shards
from trainer.errors import ConfigError, DataError, UnavailableError, fold
from trainer.process.environment import Place
from trainer.trainer import Trainer

SAMPLES = 31


class Noisy(Dataset):
    """Every sample draws from every generator there is."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor([i, random.random(), np.random.random(), float(torch.rand(()))], dtype=torch.float64)


class Augmented(Toy):
    def data(self, split: str) -> Dataset:
        return Noisy()

    def transform(self, sample: Tensor, rng: np.random.Generator) -> Tensor:
        return torch.cat([sample, torch.tensor([rng.random()], dtype=torch.float64)])

    def weight(self, batch: Tensor) -> int:
        return len(batch)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """torch waits 5 s at the end for each worker that hangs, or that a traceback still holds."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_step_is_the_ranks_part_of_the_order_cut_into_micro_batches(rank):
    start = 50  # not a multiple of the batch, past the first epoch
    order = Order([1] * SAMPLES, SEED, 5, 4)
    for n, step in enumerate(steps(small_loader(Augmented(), rank, 3, workers=0), start, 5)):
        planned = order.local(start + n * 36, start + (n + 1) * 36, rank, 3)
        assert step.refs == planned
        assert step.weights == [6, 6]
        numbers = [batch[:, 0].long().tolist() for batch in step.batches]
        assert numbers == [[ref.shard for ref in planned[:6]], [ref.shard for ref in planned[6:]]]


@pytest.fixture(scope="module")
def by_hand() -> list[Any]:
    return steps(small_loader(Augmented(), 0, 1, workers=0), 0, 6)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize(("workers", "prefetch"), [(0, 4), (1, 1), (1, 4), (3, 1), (3, 4)])
def test_workers_and_prefetch_change_no_byte(by_hand, workers, prefetch):
    for one, other in zip(by_hand, steps(small_loader(Augmented(), 0, 1, workers=workers, prefetch=prefetch), 0, 6)):
        assert (one.refs, one.weights) == (other.refs, other.weights)
        assert all(torch.equal(a, b) for a, b in zip(one.batches, other.batches))


def rows(found: list[Any]) -> dict[Ref, tuple[float, ...]]:
    """What became of each sample, by epoch."""
    return {ref: tuple(row) for step in found for ref, row in zip(step.refs, torch.cat(step.batches).tolist())}


def test_an_augmentation_is_the_samples_and_the_epochs_alone(by_hand):
    one = rows(by_hand)
    three = [rows(steps(small_loader(Augmented(), rank, 3, workers=0), 0, 2)) for rank in range(3)]
    assert len(one) == 6 * 12 and one == three[0] | three[1] | three[2]
    draws = [values[1:] for values in one.values()]
    assert len(set(itertools.chain(*draws))) == 4 * len(draws)  # no generator repeats itself, in no sample or epoch


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_batches_are_those_of_the_first_steps_and_move_nothing(by_hand, workers):
    """Between two steps; 25 samples are three steps of 12, each of two micro-batches."""
    loader = small_loader(Augmented(), 0, 1, workers=workers)
    stream = loader.train(0)
    straight = [whole(next(stream)) for _ in range(2)]
    random.seed(1)
    drawn = random.getstate()
    found = list(loader.first_batches(25, "looking"))
    assert random.getstate() == drawn
    straight += [whole(next(stream)) for _ in range(2)]
    loader.close()
    expected = [batch for step in by_hand[:3] for batch in step.batches]
    assert len(found) == 6 and all(torch.equal(a.batch, b) for a, b in zip(found, expected, strict=True))
    assert [micro.refs for micro in found] == [step.refs[i : i + 6] for step in by_hand[:3] for i in (0, 6)]
    assert [step.refs for step in straight] == [step.refs for step in by_hand[:4]]
    assert all(torch.equal(a, b) for one, other in zip(straight, by_hand) for a, b in zip(one.batches, other.batches))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", [3, 13, 31])
def test_validation_walks_each_sample_once(world, size):
    """Parts are unequal, and with 3 samples on 5 ranks two are empty."""

    class Short(Toy):
        def data(self, split: str) -> Dataset:
            return Points(96 if split == "train" else size, torch.float32)

    loaders = [small_loader(Short(), rank, world, workers=0) for rank in range(world)]
    parts = [list(loader.validate()) for loader in loaders]
    refs = [ref for part in parts for micro in part for ref in micro.refs]
    assert refs == [Ref(0, i, 0) for i in range(size)]
    assert all(len(micro.refs) <= loader.split.micro for loader, part in zip(loaders, parts) for micro in part)
    x = torch.cat([micro.batch["x"] for part in parts for micro in part])
    assert torch.equal(x, torch.stack([Points(size, torch.float32)[i]["x"] for i in range(size)]))
    if world > size:
        assert [] in parts


class Huge(Dataset):
    def __len__(self) -> int:
        return 10**11

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor(i)


def test_a_validation_lists_nothing():
    class Validated(Augmented):
        transform = None

        def data(self, split: str) -> Dataset:
            return Huge() if split == "val" else Points(96, torch.float32)

    loader = small_loader(Validated(), 1, 2, workers=0)
    assert next(loader.validate()).batch.tolist() == [5 * 10**10 + i for i in range(loader.split.micro)]


class Large(Dataset):
    def __len__(self) -> int:
        return 70_001

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor(i)


class LargeRecipe(Augmented):
    transform = None

    def data(self, split: str) -> Dataset:
        return Large()


def test_a_large_dataset_is_cut_into_virtual_shards_and_still_permuted():
    loader = small_loader(LargeRecipe(), 0, 1)
    assert loader.source.counts == [2] * 35_000 + [1]  # at most 65,536 of them
    assert loader.order.samples == 70_001
    refs = loader.order.local(0, 70_001, 0, 1)
    numbers = loader.source.numbers(refs).tolist()
    assert sorted(numbers) == list(range(70_001))
    assert numbers != sorted(numbers)
    assert [int(x) for x in loader.source.batch(refs[:5])[0]] == numbers[:5]


def write_tars(folder: Path) -> list[Path]:
    points = Points(30, torch.float32)
    samples = ({"__key__": f"{i:03d}", **{f"{k}.npy": v.numpy() for k, v in points[i].items()}} for i in range(30))
    return write_shards(samples, folder, "train", per_shard=8)


class Tars(Toy):
    """The toy's points, from tar shards or as they are."""

    def __init__(self, pattern: str | None) -> None:
        super().__init__(samples=30)
        self.pattern = pattern

    def data(self, split: str) -> Any:
        return self.pattern if self.pattern and split == "train" else super().data(split)

    def transform(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Tensor]:
        if "__key__" not in sample:
            return sample
        return {name: torch.from_numpy(sample[f"{name}.npy"]) for name in ("x", "y", "mask")}


class Audit(KeepBatches):
    """Which points each epoch of 2 and a half steps had, by their first coordinate."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def on_step_end(self, trainer) -> None:
        x = torch.cat([batch["x"][:, 0] for batch in self.batches]).tolist()
        self.points += [(ref.epoch, value) for ref, value in zip(trainer.data.refs, x, strict=True)]


def test_tar_shards_give_the_samples_of_the_dataset(tmp_path):
    points = Points(30, torch.float32)
    assert len(write_tars(tmp_path / "shards")) == 4
    seen = []
    for pattern in (None, str(tmp_path / "shards" / "train-*.tar")):
        audit = Audit()
        options = Options(max_epochs=2, run_dir=f"runs/{len(seen)}")
        Trainer(Tars(pattern), {"audit": audit}, batch=12, accumulate=2, options=options, place=Place()).fit()
        seen.append(audit.points)
    everything = sorted((epoch, float(points[i]["x"][0])) for epoch in (0, 1) for i in range(30))
    assert sorted(seen[0]) == sorted(seen[1]) == everything
    assert seen[0] != seen[1]  # other shards, another order


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_worker_asks_for_its_next_batch_before_it_reads_this_one(workers, tmp_path, monkeypatch):
    said, read = tmp_path / "said", ShardReader.read

    def tell(what: str, refs: Sequence[Ref]) -> None:
        with said.open("a") as file:
            file.writelines(f"{os.getpid()} {what} {ref.shard} {ref.offset}\n" for ref in refs)

    def tell_and_read(reader: ShardReader, ref: Ref) -> dict[str, Any]:
        tell("read", [ref])
        return read(reader, ref)

    monkeypatch.setattr(ShardReader, "prefetch", lambda reader, refs: tell("prefetch", refs))
    monkeypatch.setattr(ShardReader, "read", tell_and_read)
    steps(small_loader(Tars(write_tars(tmp_path)), 0, 1, workers=workers), 0, 6)
    micro, lines = BATCH // ACCUMULATE, [line.split() for line in said.read_text().splitlines()]
    for process in {line[0] for line in lines}:
        mine = [(what, (shard, offset)) for pid, what, shard, offset in lines if pid == process]
        asked, seen = [ref for what, ref in mine if what == "prefetch"], [ref for what, ref in mine if what == "read"]
        assert len(seen) >= 2 * micro and seen.pop(1) == seen[0]  # which is read again, with another seed
        assert asked[: len(seen) - micro] == seen[micro:]
        assert [what for what, _ in mine[: 3 * micro + 1]] == (
            ["prefetch"] * micro + ["read"] * (micro + 1) + ["prefetch"] * micro
        )


class Broken(Toy):
    """Names a bad sample, or is at fault itself."""

    def __init__(self, error: Exception, where: str) -> None:
        super().__init__()
        self.error, self.where = error, where

    def transform(self, sample: Any, rng: np.random.Generator) -> Any:
        return self.fail("transform") or sample

    def weight(self, batch: Any) -> int:
        return self.fail("weight") or super().weight(batch)

    def fail(self, where: str) -> None:
        if where == self.where:
            raise self.error


class OwnError(DataError):
    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")


class OwnAway(UnavailableError):
    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")


@pytest.mark.parametrize(("error", "where"), [(OwnError, "transform"), (OwnError, "weight"), (OwnAway, "transform")])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_bad_data_is_one_line_from_a_worker_too(error, where, workers):
    with pytest.raises(error.__base__, match=r"^07\.png: is no image$"):
        steps(small_loader(Broken(error("07.png", "is no image"), where), 0, 1, workers=workers), 0, 1)


@pytest.mark.parametrize("workers", quick([0, 1]))
def test_an_error_of_the_recipes_names_the_sample_and_has_its_frames(workers):
    loader = small_loader(Broken(ZeroDivisionError("own"), "transform"), 0, 1, workers=workers)
    with pytest.raises(RuntimeError, match=r"^sample \d+: ZeroDivisionError: own\n  File ") as caught:
        steps(loader, 0, 1)
    assert str(caught.value).count("source.py") == 2  # of our code; a terminal shows none of it
    assert set(re.findall(r'File "([^"]*)"', fold(str(caught.value)))) == {__file__}
    assert "in fail" in str(caught.value)
    caught.value.__traceback__ = None  # its frames hold the worker


class OneIsOdd(Toy):
    def __init__(self, odd: Any) -> None:
        super().__init__()
        self.odd = odd

    def data(self, split: str) -> Any:
        points = Points(24, torch.float32)
        return Listed([self.odd if i == 7 else points[i]["x"] for i in range(24)])

    def weight(self, batch: Any) -> int:
        return len(batch)


class Listed:
    """As Hugging Face's: it inherits from nothing."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


@pytest.mark.parametrize("odd", [object(), torch.zeros(3)], ids=["object", "ragged"])
def test_a_sample_that_does_not_go_into_a_batch_is_named(odd):
    with pytest.raises(
        ConfigError, match=r"^sample 7: does not fit into a batch \((default_collate|stack expects).*\); "
    ):
        steps(small_loader(OneIsOdd(odd), 0, 1, workers=0), 0, 2)


def test_what_has_items_and_a_length_is_a_data_set():
    """Its rows were taken for batches."""
    found = steps(small_loader(OneIsOdd(torch.zeros(8)), 0, 1, workers=0), 0, 2)
    assert sorted(ref.shard for step in found for ref in step.refs) == list(range(24))
    assert all(batch.shape == (6, 8) for step in found for batch in step.batches)


def test_a_damaged_sample_is_left_out_and_named_by_a_worker_too(tmp_path):
    shard = write_tars(tmp_path)[1]
    loader = small_loader(Tars(str(tmp_path / "*.tar")), 0, 1, workers=1)
    content = bytearray(shard.read_bytes())
    content[700] ^= 1
    shard.write_bytes(content)
    found = steps(loader, 0, 3)
    bad = [each for step in found for each in step.bad]
    assert len(bad) >= 1 and {(each.ref.shard, each.ref.offset) for each in bad} == {(1, 0)}
    assert bad[0].why.startswith(f"{shard}: sample 0 ('008'): the checksum of ") and "\n" not in bad[0].why
    assert bad[0].why.endswith("read 3 times; restore the shard")
    for step in found:
        assert sum(len(batch["x"]) for batch in step.batches) == len(step.refs) - len(step.bad)


def open_files(folder: Path) -> list[str]:
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it meanwhile
            targets.append(os.readlink(link))
    return [target for target in targets if target.startswith(str(folder))]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc")
@pytest.mark.parametrize("workers", [0, 1])
def test_close_ends_workers_and_closes_files(workers, tmp_path):
    write_tars(tmp_path)
    loader = small_loader(Tars(str(tmp_path / "*.tar")), 0, 1, workers=workers)
    loader.close()  # before there is anything to close
    before = set(multiprocessing.active_children())
    stream = loader.train(0)
    next(stream)
    opened = set(multiprocessing.active_children()) - before
    assert (len(opened), bool(open_files(tmp_path))) == (workers, not workers)
    loader.close()
    deadline = time.monotonic() + 5
    while any(process.is_alive() for process in opened) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(process.is_alive() for process in opened)
    assert not open_files(tmp_path)
    assert list(stream) == []
