"""Several validation sets: each has its own metrics, exact over ranks, which select the best and stop the run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn
from toy_recipe import Points, Toy

from trainer.callbacks.early_stop import EarlyStop
from trainer.callbacks.shard.callback import Shard
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")


class TwoSets(Toy):
    def data(self, split: str) -> Any:
        return (
            Points(96, self.dtype)
            if split == "train"
            else {"short": Points(5, self.dtype), "long": Points(13, self.dtype)}
        )

    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        error = (model(batch["x"]) - batch["y"]).abs().mean(dim=1)
        return {"error": (error.sum(), len(error)), "samples": (torch.tensor(float(len(error))), 1)}


def train(place: Place, callbacks: Any = None, **options: Any) -> Trainer:
    trainer = Trainer(
        TwoSets(dtype="float64"), callbacks, batch=12, micro_batch=2,
        options=Options(**{"max_steps": 2, "run_dir": "runs/r", **options}), data=DataOptions(workers=0), place=place,
    )  # fmt: skip
    trainer.fit()
    return trainer


def by_hand(model: nn.Module, size: int) -> float:
    """The mean error in plain PyTorch."""
    points = Points(size, torch.float64)
    with torch.no_grad():
        errors = [(model(points[i]["x"][None]) - points[i]["y"]).abs().mean() for i in range(size)]
    return float(torch.stack(errors).mean())


def validated(place: Place, sharded: bool) -> tuple[dict[str, float], dict[str, float]]:
    trainer = train(place, [Shard(stage=3)] if sharded else [])
    expected = (
        {} if sharded else {f"val/{name}/error": by_hand(trainer.module, n) for name, n in (("short", 5), ("long", 13))}
    )
    return trainer.validation, expected


@pytest.mark.parametrize("world", [1, 3])
def test_each_set_has_its_own_metrics_on_any_number_of_ranks(world):
    for found, expected in run_ranks(world, validated, False):
        assert list(found) == ["val/short/error", "val/short/samples", "val/long/error", "val/long/samples"]
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert json.loads(Path("runs/r/summary.json").read_text())["val/long/error"] == found["val/long/error"]


def test_ranks_in_lockstep_walk_each_set():
    """Of the short set's 5 samples, one of two ranks has one micro-batch less."""
    plain = run_ranks(2, validated, False)[0][0]
    Path("runs").rename("runs-plain")
    Path("ckpt").rename("ckpt-plain")
    for found, _ in run_ranks(2, validated, True):
        assert found == pytest.approx(plain, rel=1e-5)


def test_a_set_selects_the_best_and_stops_the_run():
    best = CheckpointOptions(keep_best="val/long/error")
    trainer = train(Place(), [EarlyStop("val/short/error")], checkpoint=best, validate_every=1)
    assert trainer.best["metric"] == "val/long/error"


def test_a_metric_of_no_set_is_refused():
    with pytest.raises(
        ConfigError, match=r"early_stop\.metric=val/error: validation gives no such metric; did you mean"
    ):
        train(Place(), [EarlyStop("val/error")])
