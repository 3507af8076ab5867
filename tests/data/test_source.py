"""Limits: which samples an epoch, a validation and an overfit run see, on one rank and on three."""

import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.messages import refuses
from support.quick import quick
from support.ranks import run_ranks
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.config.options import DataOptions, LimitOptions, Options
from trainer.data.batch import Split, Step
from trainer.data.iterable import Iterated as Source
from trainer.data.loader import Loader
from trainer.data.opening import open_source
from trainer.data.source import NamedSources, Samples
from trainer.errors import ConfigError
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")


class Seen(Callback):
    def __init__(self) -> None:
        self.refs: list[int] = []

    def on_step_end(self, trainer) -> None:
        own = [trainer.plan.source.bases[ref.shard] + ref.offset for ref in trainer.data.refs]
        self.refs += [number for part in trainer.ranks.gather(own) for number in part]


class Numbered(Toy):
    """Counts the samples of a validation, and sums their first number."""

    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        return {"first": (batch["x"][:, 0].sum(), len(batch["x"]))}


def train(place: Place, options: dict[str, Any]) -> tuple[list[int], dict[str, float], int | None]:
    seen = Seen()
    trainer = Trainer(
        Numbered(samples=40, dtype="float64"), [seen], batch=6, micro_batch=2,
        options=Options(**{"max_epochs": 2, "run_dir": "runs/r", **options}), place=place,
        data=DataOptions(workers=0, shuffle_shards=5, shuffle_window=4),
    )  # fmt: skip
    trainer.fit()
    return seen.refs, trainer.validation, trainer.plan.epoch_samples


def first(samples: int) -> float:
    """The mean of the first number of the first samples."""
    points = Numbered(dtype="float64").data("val")
    return sum(float(points[i]["x"][0]) for i in range(samples)) / samples


@pytest.mark.parametrize("world", [1, 3])
def test_an_epoch_of_two_batches_and_a_validation_of_one(world):
    for refs, validation, epoch in run_ranks(world, train, {"limit_batches": LimitOptions(2, 1)}):
        assert epoch == 12 and sorted(refs) == sorted([*range(12)] * 2)
        assert validation["val/first"] == pytest.approx(first(6), rel=1e-12)


def test_overfit_trains_and_validates_on_the_same_samples():
    refs, validation, epoch = train(Place(), {"max_epochs": None, "max_steps": 5, "overfit": 1})
    assert epoch == 6 and sorted(refs) == sorted([*range(6)] * 5)
    assert validation["val/first"] == pytest.approx(first(6), rel=1e-12)  # the toy's two splits begin alike


def test_limits_beyond_the_data_change_no_sample():
    refs, validation, epoch = train(Place(), {"limit_batches": LimitOptions(99, 99)})
    assert epoch == 40 and len(set(refs)) == 40 and validation["val/first"] == pytest.approx(first(13), rel=1e-12)


def test_limited_data_is_other_data():
    source = open_source(Toy(), "train", 0)
    limited = source.first(2, 6, 1, "key")
    assert limited.fingerprint != source.fingerprint and sum(limited.counts) == 12


def test_several_validation_sets_are_limited_each():
    several = NamedSources({"list": Source([1, 2, 3]), "points": open_source(Toy(), "val", 0)})
    limited = several.first(2, 6, 1, "key")
    loader = Loader(Source([]), None, Split(2), DataOptions(workers=0), weight=lambda batch: 1)
    walked = [[micro.batch for micro in loader.validate(limited["list"])] for _ in range(2)]
    assert walked == [[1, 2]] * 2 and sum(limited["points"].counts) == 12


class Batches:
    """Batches of one sample, whose number is the sample's in this pass and on this rank. Each pass has other noise."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        for i in range(9):
            sample = {name: value[None] for name, value in Numbered(dtype="float64").data("val")[i].items()}
            yield {**sample, "i": torch.tensor([10 * rank + i]), "noise": torch.rand(1)}


class Iterated(Numbered):
    def __init__(self, kind: str) -> None:
        super().__init__(dtype="float64")
        self.kind = kind

    def data(self, split: str) -> Any:
        if split == "val":
            return super().data(split)
        if self.kind == "stream":
            return Streamed()
        return iter(Batches()) if self.kind == "generator" else Batches()

    def weight(self, batch: dict[str, Tensor]) -> int:
        return len(batch["x"])


class Streamed:
    yields_samples = True

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for i in range(40):
            yield {**Numbered(dtype="float64").data("val")[i], "i": torch.tensor(i), "noise": torch.rand(())}


class Numbers(Callback):
    def __init__(self) -> None:
        self.seen: list[list[list[float]]] = []

    def wrap_batches(self, trainer, steps: Iterator[Step]) -> Iterator[Step]:
        for step in steps:
            self.seen.append([[batch["i"].item(), batch["noise"].item()] for batch in step._batches])
            yield step


def iterated(place: Place, kind: str, steps: int, resume: str | None = None, limit: int | None = 2) -> Any:
    numbers = Numbers()
    Trainer(
        Iterated(kind), [numbers], batch=2 * place.world, accumulate=2, place=place, data=DataOptions(workers=0),
        options=Options(
            max_steps=steps, run_dir="runs/r", resume=resume, log_every_steps=1, limit_batches=LimitOptions(train=limit)
        ),
    ).fit()  # fmt: skip
    return numbers.seen


@pytest.mark.parametrize("world", quick([1, 3, 2], 2))
def test_an_iterable_is_walked_to_its_second_batch_and_a_resume_goes_on_there(world):
    """A batch of the run is two micro-batches of each rank, so the third step begins a pass."""
    straight = run_ranks(world, iterated, "batches", 5)
    shutil.rmtree("ckpt")
    shutil.rmtree("runs")
    run_ranks(world, iterated, "batches", 3)
    rest = run_ranks(world, iterated, "batches", 5, "auto")
    for rank, (steps, resumed) in enumerate(zip(straight, rest, strict=True)):
        numbers = [[i for i, _ in step] for step in steps]
        assert numbers == [[10 * rank + i for i in pair] for pair in ([0, 1], [2, 3], [0, 1], [2, 3], [0, 1])]
        assert steps[0] != steps[2] and resumed == steps[3:]


@pytest.mark.parametrize("world", [1, 2])
def test_a_stream_is_walked_to_its_second_batch(world):
    for rank, steps in enumerate(run_ranks(world, iterated, "stream", 3)):
        numbers = [[i for i, _ in step] for step in steps]
        assert numbers == [[world * i + rank for i in pair] for pair in ([0, 1], [2, 3], [0, 1])]


def test_a_resume_with_another_limit_is_refused():
    iterated(Place(), "batches", 2)
    for limit in (3, None):
        now = f"iterable first {2 * limit}" if limit else "iterable"
        with refuses("trainer.resume", "data", "iterable first 4", now, "'trainer.accept=[data]'"):
            iterated(Place(), "batches", 4, "auto", limit)


def test_what_can_be_walked_once_is_refused():
    with pytest.raises(ConfigError) as refused:
        iterated(Place(), "generator", 2)
    assert str(refused.value) == (
        "trainer.limit_batches.train=2: recipe.data('train') is a generator, which can be iterated only once; give "
        "trainer.max_steps instead, or return an object whose __iter__ starts over"
    )


def test_overfit_needs_the_same_batches_again():
    recipe, options = Iterated("batches"), Options(max_steps=1, overfit=2, run_dir="runs/r")
    with refuses("trainer.overfit=2", "trainer.limit_batches.train"):
        Trainer(recipe, batch=1, options=options, data=DataOptions(workers=0))


def test_a_mixture_gives_the_first_samples_of_each_data_set_by_weight():
    """Of 12 samples the first data set gives 9; of its shards the third has no sample left."""
    mixed = Samples(None, [6, 5, 4, 8, 2], "fingerprint", None, 0, [(3, 3.0), (2, 1.0)])  # pyright: ignore[reportArgumentType]
    limited = mixed.first(2, 6, 1, "key")
    assert (limited.counts, limited.mixed) == ([6, 3, 0, 3, 0], mixed.mixed) and limited.fingerprint != "fingerprint"
    refs = limited.order(4, 2).local(0, 4096, 0, 1)
    times = Counter(limited.bases[ref.shard] + ref.offset for ref in refs)
    assert {(ref.shard, ref.offset) for ref in refs} == {
        *((0, i) for i in range(6)), *((1, i) for i in range(3)), *((3, i) for i in range(3))
    }  # fmt: skip
    assert set(times) == set(range(12)) and max(times.values()) - min(times.values()) <= 1
    assert limited.order(4, 2).samples == 12


def test_limits_that_contradict_each_other_are_refused():
    with refuses("trainer.overfit=1", "own", "leave limit_batches out"):
        Options(overfit=1, limit_batches=LimitOptions(train=1))
    with refuses("trainer.limit_batches.validation=0", "at least 1"):
        LimitOptions(validation=0)
