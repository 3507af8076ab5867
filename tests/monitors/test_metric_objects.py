"""torchmetrics' objects in a recipe: computed over all ranks, anew in each validation, beside (sum, count)."""

from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn
from toy_recipe import Points, Toy

from trainer.callbacks.shard.callback import Shard
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError, DataError
from trainer.process.environment import Place
from trainer.trainer import Trainer

torchmetrics = pytest.importorskip("torchmetrics")


class Measured(Toy):
    """The median is no mean: it needs all values at one place."""

    def __init__(self, kind: str = "median", **knobs: Any) -> None:
        super().__init__(dtype="float64", **knobs)
        self.kind, self.metric = kind, None

    def data(self, split: str) -> Any:
        points = Points(96 if split == "train" else 1 if self.kind == "few" else 13, self.dtype)
        return {"a": points, "b": points} if (split, self.kind) == ("val", "several") else points

    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        if self.metric is None:
            self.metric = torchmetrics.CatMetric() if self.kind == "all" else Median()
        self.metric.update(batch["x"][:, 0])
        return {"x": self.metric, "first": (batch["x"][:, 0].sum(), len(batch["x"]))}


class Median(torchmetrics.CatMetric):
    def compute(self) -> Tensor:
        return super().compute().median()


def train(place: Place, kind: str, sharded: bool = False) -> Any:
    trainer = Trainer(
        Measured(kind), [Shard(stage=3)] if sharded else [], batch=12, micro_batch=2, place=place,
        options=Options(max_steps=2, validate_every=1, run_dir="runs/r"), data=DataOptions(workers=0),
    )  # fmt: skip
    trainer.fit()
    if place.world == 1:
        assert trainer.evaluate() == pytest.approx(trainer.validation)  # no batch of the run is left in the objects
    return trainer.validation


def refused(place: Place, kind: str, sharded: bool) -> str:
    with pytest.raises((ConfigError, DataError)) as error:
        train(place, kind, sharded)
    return str(error.value)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("world", [1, 3])
def test_a_value_is_that_of_all_samples_once(world):
    values = torch.stack([Points(13, torch.float64)[i]["x"][0] for i in range(13)])
    for found in run_ranks(world, train, "median"):
        assert found == pytest.approx({"val/x": float(values.median()), "val/first": float(values.mean())}, rel=1e-6)


@pytest.mark.parametrize(
    "world, kind, sharded, said",
    [
        (1, "several", False, "returned a Median for 'x', and there are several data sets; return (sum, count)"),
        (
            2,
            "median",
            True,
            "returned a Median for 'x', and ranks repeat batches, to keep in step; return (sum, count)",
        ),
        (1, "all", False, "val/x computes a tensor of shape (13,); give an object that computes one number"),
        (2, "few", False, "has no batch, and torchmetrics' objects need one on each rank; return more validation data"),
    ],
)
def test_what_can_not_be_exact_is_refused(world, kind, sharded, said):
    assert all(said in text for text in run_ranks(world, refused, kind, sharded))
