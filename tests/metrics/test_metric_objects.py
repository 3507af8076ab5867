"""torchmetrics' objects in a recipe: computed over all ranks, anew in each validation, beside (sum, count)."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.needs import needs
from support.ranks import run_ranks
from torch import Tensor, nn
from toy_recipe import Points, Toy

from trainer.callbacks.early_stop import EarlyStop
from trainer.callbacks.pipeline.callback import PipelineParallel
from trainer.callbacks.shard.callback import Shard
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError
from trainer.metrics.metric_objects import kept
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = [needs("torchmetrics"), pytest.mark.usefixtures("tmp_path")]
SIZES = {"val": 13, "val/a": 13, "val/b": 5}


class Measured(Toy):
    """Has an object of each kind: its state is a list, is changed in place, or is shared within a collection."""

    def __init__(self, kind: str = "usual", **knobs: Any) -> None:
        import torchmetrics
        from metric_classes import Median

        super().__init__(dtype="float64", **knobs)
        self.kind = kind
        self.median = torchmetrics.CatMetric() if kind == "all" else Median()
        self.mean = torchmetrics.MeanMetric()
        self.classes = torchmetrics.MetricCollection(
            [torchmetrics.classification.BinaryPrecision(), torchmetrics.classification.BinaryRecall()]
        )

    def data(self, split: str) -> Any:
        if split == "train":
            return Points(96, self.dtype)
        if self.kind == "several":
            return {name[4:]: Points(SIZES[name], self.dtype) for name in ("val/a", "val/b")}
        return Points(2 if self.kind == "few" else 13, self.dtype)

    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        model(batch["x"])  # which needs all ranks, with shard and pipeline
        x = batch["x"]
        self.median.update(x[:, 0])
        self.mean.update(x[:, 0])
        self.classes.update(x[:, 1], (x[:, 2] > 0.5).long())
        found = {"median": self.median, "mean": self.mean, "cls": self.classes}
        return found | {"first": (x[:, 0].sum(), len(x))}


class Extremes(Toy):
    """`reset` of its object leaves the largest value of all validations."""

    def __init__(self) -> None:
        import torchmetrics

        super().__init__(dtype="float64")
        self.largest = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())

    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        self.largest.update(batch["x"][:, 0])
        return {"x": self.largest}


def test_the_trial_before_step_1_leaves_nothing_in_an_object(tmp_path):
    """The data are the same in each validation, and the trial has a part of them."""
    options = Options(max_steps=2, run_dir=str(tmp_path / "runs/r"))
    found = Trainer(Extremes(), {}, batch=4, options=options, data=DataOptions(workers=0)).fit()
    assert found["val/x/min"] == found["val/x/raw"] == found["val/x/max"]


class AtTheEnd(Measured):
    """The object is given at the end alone."""

    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        found = super().metrics(model, batch)
        return {"first": found["first"]}

    def validation_end(self, model: nn.Module) -> dict[str, Any]:
        return {"median": self.median, "mean": self.mean, "cls": self.classes}


def by_torchmetrics(prefix: str, size: int) -> dict[str, float]:
    """The values of torchmetrics alone, from all samples in one batch."""
    recipe = Measured()
    recipe.metrics(nn.Identity(), {"x": torch.stack([Points(size, torch.float64)[i]["x"] for i in range(size)])})
    values = {f"cls/{name}": value for name, value in recipe.classes.compute().items()}
    values |= {"median": recipe.median.compute(), "mean": recipe.mean.compute(), "first": recipe.mean.compute()}
    return {f"{prefix}/{name}": float(value) for name, value in values.items()}


def train(place: Place, recipe: Measured, callbacks: Any = None, **options: Any) -> Any:
    trainer = Trainer(
        recipe, callbacks or [], batch=12, micro_batch=2, place=place, data=DataOptions(workers=0),
        options=Options(**{"max_steps": 2, "validate_every": 1, "run_dir": "runs/r", "timeout_s": 60.0, **options}),
    )  # fmt: skip
    trainer.fit()
    return trainer


def validated(place: Place, kind: type[Measured], named: str, layout: str) -> dict[str, float]:
    layouts = {"": [], "shard": [Shard(stage=3)], "pipeline": [PipelineParallel(stages=2, schedule="gpipe", cut=[1])]}
    trainer = train(place, kind(named), layouts[layout])
    if place.world == 1:
        assert trainer.evaluate() == trainer.validation  # no batch of the run is left in the objects
    return trainer.validation


CASES = [
    pytest.param(1, "usual", "", marks=pytest.mark.slow),
    pytest.param(3, "usual", "", marks=pytest.mark.slow),
    pytest.param(3, "few", "", marks=pytest.mark.slow),  # a rank has no batch
    pytest.param(1, "several", "", marks=pytest.mark.slow),
    pytest.param(2, "several", "", marks=pytest.mark.slow),
    (2, "usual", "shard"),  # a rank repeats its last batch
    pytest.param(3, "usual", "shard", marks=pytest.mark.slow),  # two ranks do
    pytest.param(2, "several", "shard", marks=pytest.mark.slow),
    pytest.param(2, "usual", "pipeline", marks=pytest.mark.slow),  # the last stage alone has the objects
    pytest.param(
        4, "usual", "pipeline", marks=pytest.mark.slow
    ),  # the last stage of two replicas, one of which repeats its last batch
]


@pytest.mark.parametrize("world, named, layout", CASES)
@pytest.mark.parametrize("kind", [Measured, pytest.param(AtTheEnd, marks=pytest.mark.slow)])
def test_a_value_is_torchmetrics_own_of_all_samples_once(world, named, layout, kind):
    prefixes = ["val/a", "val/b"] if named == "several" else ["val"]
    expected: dict[str, float] = {}
    for prefix in prefixes:
        expected |= by_torchmetrics(prefix, 2 if named == "few" else SIZES[prefix])
    for found in run_ranks(world, validated, kind, named, layout):
        assert found == pytest.approx(expected, rel=1e-6)
        exact = [name for name in expected if "cls" in name or "median" in name]
        assert {name: found[name] for name in exact} == {name: expected[name] for name in exact}


def test_a_value_that_is_no_number_is_refused_before_step_1():
    said = "val/median computes a tensor of shape (13,); give an object that computes one number"
    with pytest.raises(ConfigError, match=re.escape(said.replace("13", "4"))):  # of the tried batches
        train(Place(), Measured("all"))
    assert not Path("ckpt").exists()


@pytest.mark.parametrize("key", ["keep_best", "early_stop"])
def test_a_number_of_a_collection_is_watched_and_the_collection_is_refused(key):
    for name, known in (("val/cls/BinaryRecall", True), ("val/cls", False), ("val/cls/Recal", False)):
        best = CheckpointOptions(keep_best=f"max {name}" if key == "keep_best" else None)
        stops = [EarlyStop(name, mode="max")] if key == "early_stop" else []
        if known:
            trainer = train(Place(), Measured(), stops, checkpoint=best)
            assert key == "early_stop" or trainer.best["value"] == trainer.validation[name]
        else:
            with pytest.raises(ConfigError, match=f"={name}: validation gives no such metric; did you .*BinaryRecall"):
                train(Place(), Measured(), stops, checkpoint=best, run_dir="runs/refused")


class FailsOnOne(Toy):
    """Two objects: what follows the one that fails communicates, too."""

    def __init__(self) -> None:
        from metric_classes import FailsToCompute, Median

        super().__init__()
        self.objects = {"a": FailsToCompute(), "b": Median()}

    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        for metric in self.objects.values():
            metric.update(batch["x"][:, 0])
        return self.objects


def failed(place: Place) -> str:
    with pytest.raises(Exception) as caught:
        train(place, FailsOnOne(), validate_every=None)  # pyright: ignore[reportArgumentType]
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.slow
def test_a_value_that_fails_on_one_rank_hangs_no_other():
    others = "DistError: rank 1 failed in validation"
    assert run_ranks(3, failed) == [others, "OSError: no more memory on this GPU", others]


class Holder:
    def __init__(self) -> None:
        self.number, self.tensor, self.list, self.nested = 1, torch.zeros(2), [1], {"a": [1]}
        self._private = {"b": [1]}


def test_attributes_are_put_back():
    one = Holder()
    with kept([one, object()]):
        one.number, one._private["c"] = 2, [2]
        one.tensor += 1
        one.list.append(2)
        one.nested["a"].append(2)
        one.nested["b"] = [3]
    assert (one.number, one.tensor.tolist(), one.list, one.nested) == (1, [0.0, 0.0], [1], {"a": [1]})
    assert one._private == {"b": [1], "c": [2]}  # a module's parameters are in such a dict
