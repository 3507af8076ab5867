"""Streams of samples: split over ranks, batched, transformed, walked again, and resumed."""

import itertools
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.messages import refuses
from support.needs import needs
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate

from trainer.callback import Callback
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.data.opening import open_source
from trainer.data.stream import Stream, is_stream, shuffled
from trainer.errors import ConfigError, message
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = [needs("datasets"), pytest.mark.usefixtures("tmp_path")]


class Numbers(IterableDataset):
    yields_samples = True

    def __init__(self, size: int) -> None:
        self.size, self.epochs = size, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[dict[str, int]]:
        yield from ({"i": i} for i in range(self.size))


def numbered(size: int) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"i": list(range(size))})


def hugging_face(size: int, shards: int) -> Any:
    return numbered(size).to_iterable_dataset(num_shards=shards)


class Streams:
    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size = kind, size

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self, split: str) -> Any:
        size = self.size if split == "train" else 7
        if self.kind == "map":
            return numbered(size)
        return Numbers(size) if self.kind == "torch" else hugging_face(size, int(self.kind))

    def transform(self, sample: dict[str, int], rng: Any) -> Tensor:
        return torch.tensor([float(sample["i"]), rng.random()])

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch[:, :1]) * 1e-6).square().mean()

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, tuple[Tensor, int]]:
        return {"i": (batch[:, 0].sum(), len(batch))}


class Seen(Callback):
    """The samples of each step, over all ranks, as `wrap_batches` sees them."""

    def __init__(self) -> None:
        self.steps: list[list[float]] = []

    def wrap_batches(self, trainer, steps):
        for step in steps:
            own = [value for batch in step._batches for value in batch.flatten().tolist()]
            self.steps.append(sorted(value for part in trainer.ranks.gather(own) for value in part))
            yield step


def train(
    place: Place,
    kind: str,
    steps: int,
    resume: str | None = None,
    buffer: int = 0,
    run_dir: str = "runs/r",
    **options: Any,
) -> tuple[Any, Any]:
    seen = Seen()
    trainer = Trainer(
        Streams(kind, 10), [seen], batch=4, accumulate=1, place=place,
        data=DataOptions(workers=0, shuffle_buffer=buffer),
        options=Options(max_steps=steps, run_dir=run_dir, resume=resume, checkpoint=CheckpointOptions(), **options),
    )  # fmt: skip
    trainer.fit()
    return seen.steps, trainer.validation


@pytest.mark.parametrize("resumed_at", [1, 2, 3])
def test_a_shuffled_stream_has_each_sample_once_a_pass_and_a_resume_its_order(resumed_at):
    straight, _ = train(Place(), "torch", 4, buffer=4)
    plain, _ = train(Place(), "torch", 4, run_dir="runs/plain")
    assert straight != plain and straight[:2] != straight[2:]
    for shown in (straight[:2], straight[2:]):
        assert len(numbers(shown)) == len(set(numbers(shown))) >= 7
    for folder in ("runs", "ckpt"):
        shutil.rmtree(folder)
    first, _ = train(Place(), "torch", resumed_at, buffer=4)
    rest, _ = train(Place(), "torch", 4, resume="auto", buffer=4)
    assert [*first, *rest[resumed_at - 4 :]] == straight
    with refuses("trainer.resume", "shuffle_buffer=4"):
        train(Place(), "torch", 5, resume="auto")


ORDER = [0, 3, 1, 6, 2, 4, 9, 7, 5, 11, 8, 10]


def test_the_order_of_a_shuffle_buffer_is_frozen():
    """A change would give every resumed run of a shuffled stream other samples."""
    assert list(shuffled(range(12), 4, 7, 1, 2)) == ORDER
    assert [sorted(shuffled(range(12), size, 3, 0, 0)) for size in (1, 5, 12, 99)] == [list(range(12))] * 4
    assert list(shuffled(range(5), 1, 3, 0, 0)) == list(range(5))


def test_a_shuffle_buffer_holds_no_more_than_its_size():
    """As an endless stream needs."""
    taken = list[int]()
    shown = shuffled((taken.append(i) or i for i in itertools.count()), 100, 0, 0, 0)
    found = [next(shown) for _ in range(1000)]
    assert len(taken) == 1099 and all(value < i + 100 for i, value in enumerate(found))
    assert found != sorted(found) and len(set(found)) == 1000


def test_a_drawn_sample_is_named_by_its_place_in_the_stream():
    stream = Stream([*range(3), None, *range(20)], None, 0, buffer=20)
    with refuses("recipe.data", "sample 3 is None"):
        list(stream.batches(24, 0, 1, default_collate, True))


def test_validation_has_the_streams_order():
    stream = Stream(range(9), None, 0, buffer=5)
    assert list(stream.batches(4, 0, 1, list, False)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert sorted(itertools.chain(*stream.batches(3, 0, 1, list, True))) == list(range(9))


@pytest.mark.parametrize(
    ("data", "why"), [(numbered(3), "shuffled anyway"), ([torch.ones(2)], "batches"), ("x-*.tar", "shuffled anyway")]
)
def test_a_shuffle_buffer_is_for_streams(data, why):
    class Own(Streams):
        def data(self, split):
            return data

    with refuses("data.shuffle_buffer=4", why):
        open_source(Own("", 1), "train", 0, DataOptions(shuffle_buffer=4))


def numbers(steps: list[list[float]]) -> list[float]:
    return sorted(value for step in steps for value in step if value == int(value) and value >= 1)


@pytest.mark.parametrize("kind", ["torch", "1", "2"])
def test_ranks_share_the_samples_of_a_stream(kind):
    """10 samples are two batches of 4 on two ranks; the rest of a pass is dropped in training, and validated."""
    for steps, validation in run_ranks(2, train, kind, 2):
        assert len(set(numbers(steps))) == len(numbers(steps)) and set(numbers(steps)) <= set(range(1, 10))
        assert len(numbers(steps)) >= 7  # 0 aside, which random numbers could equal
        assert validation == {"val/i": 3.0}


def test_a_map_style_data_set_of_hugging_face_is_a_dataset():
    _, validation = train(Place(), "map", 2)
    assert validation == {"val/i": 3.0}


def test_each_pass_draws_other_random_numbers_and_a_resume_the_same():
    straight, _ = train(Place(), "torch", 4)
    assert numbers(straight[:2]) == numbers(straight[2:]) and straight[:2] != straight[2:]
    for folder in ("runs", "ckpt"):
        shutil.rmtree(folder)
    first, _ = train(Place(), "torch", 2)
    rest, _ = train(Place(), "torch", 4, resume="auto")
    assert [first, rest[-2:]] == [straight[:2], straight[2:]]


def test_the_data_set_is_told_the_epoch():
    numbers = Numbers(5)
    batches = Stream(numbers, None, 0).batches(2, 0, 1, list, True)
    assert [len(list(batches)) for _ in range(3)] == [2, 2, 2] and numbers.epochs == [0, 1, 2]
    validation = Stream(numbers, None, 0).batches(2, 0, 1, list, False)
    assert [len(list(validation)) for _ in range(2)] == [3, 3] and numbers.epochs[3:] == [0, 0]


def test_samples_that_fit_into_no_batch_are_told():
    batches = Stream([torch.ones(2), torch.ones(3)], None, 0).batches(2, 0, 1, default_collate, True)
    with refuses("recipe.data", "samples", "stream"):
        list(batches)


def forgets(sample: int, rng: Any) -> Any:
    return sample if sample < 3 else None


def looks_up(samples: list[int]) -> Any:
    return torch.tensor(samples) if 2 not in samples else {}["mine"]


def refusing(samples: list[int]) -> Any:
    raise ConfigError("recipe.words=7: give more")


@pytest.mark.parametrize(
    ("transform", "collate", "lines"),
    [
        (forgets, default_collate, ["echelon: recipe.data: sample 3 is None; return the sample from recipe.forgets()"]),
        (None, looks_up, ["in looks_up", "KeyError: 'mine'", "  on samples 2 to 3 of rank 0 in pass 0 of the stream"]),
        (None, refusing, ["echelon: recipe.words=7: give more"]),
        (None, lambda samples: None, ["echelon: recipe.collate(): returned None; return the batch"]),
        (
            lambda sample, rng: 1 / (1 - sample),
            default_collate,
            ["in <lambda>", "ZeroDivisionError: division by zero", "  on sample 1 of rank 0 in pass 0 of the stream"],
        ),
    ],
)
def test_an_error_of_the_recipe_shows_its_frames_and_the_sample(transform, collate, lines):
    with pytest.raises(Exception) as caught:
        list(Stream(range(6), transform, 0).batches(2, 0, 1, collate, True))
    told = message(caught.value)
    assert all(line in told for line in lines) and told.endswith(lines[-1])
    assert len(lines) > 1 or told == lines[0]


def test_what_is_a_stream():
    assert (
        is_stream(hugging_face(3, 1)) and is_stream(hugging_face(3, 1).with_format("torch")) and is_stream(Numbers(1))
    )
    assert not is_stream(numbered(1)) and not is_stream([1])
