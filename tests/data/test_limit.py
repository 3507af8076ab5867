"""Limits: which samples an epoch, a validation and an overfit run see, on one rank and on three."""

from typing import Any

import pytest
from support.ranks import run_ranks
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.config.options import DataOptions, LimitOptions, Options
from trainer.data.batch import Split
from trainer.data.limit import first_batches, first_validation
from trainer.data.loader import Loader
from trainer.data.source import Several, open_source
from trainer.errors import ConfigError
from trainer.process.environment import Place
from trainer.trainer import Trainer


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
        data=DataOptions(workers=0, lanes=5, block=4),
    )  # fmt: skip
    trainer.fit()
    return seen.refs, trainer.validation, trainer.plan.epoch_samples


def first(samples: int) -> float:
    """The mean of the first number of the first samples."""
    points = Numbered(dtype="float64").data("val")
    return sum(float(points[i]["x"][0]) for i in range(samples)) / samples


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


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
    limited = first_batches(source, 2, 6, "key")
    assert limited.fingerprint != source.fingerprint and sum(limited.counts) == 12
    assert first_batches(source, None, 6, "key") is source


def test_an_iterable_is_limited_for_validation_alone():
    several = Several({"list": [1, 2, 3], "points": open_source(Toy(), "val", 0)})
    limited = first_validation(several, 2, 6)
    loader = Loader([], None, Split(2), DataOptions(workers=0), weight=lambda batch: 1)
    walked = [[micro.batch for micro in loader.validate(limited["list"])] for _ in range(2)]
    assert walked == [[1, 2]] * 2 and sum(limited["points"].counts) == 12
    with pytest.raises(
        ConfigError, match=r"^trainer\.overfit=2: .* is an iterable of batches, .* give trainer\.max_steps"
    ):
        first_batches([1, 2, 3], 2, 6, "trainer.overfit")


def test_limits_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match=r"^trainer\.overfit=1: has batches of its own; leave limit_batches out$"):
        Options(overfit=1, limit_batches=LimitOptions(train=1))
    with pytest.raises(ConfigError, match=r"^trainer\.limit_batches\.validation=0: must be at least 1$"):
        LimitOptions(validation=0)
