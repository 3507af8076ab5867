"""Validation where there is little or nothing to count: weight 0, no batch, data that can be walked only once."""

import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cli import lines, weights
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset
from toy_recipe import Points, Toy

from trainer.agreement import StepAgreement
from trainer.callback import Callback
from trainer.callbacks.early_stop import EarlyStop
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.shard.callback import Shard
from trainer.checkpoint.locate import checkpoints
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError, DataError
from trainer.loggers.metrics_file import MetricsFile
from trainer.process.environment import Place
from trainer.trainer import Trainer

SIZE = 12


class Masked(Points):
    """Of the first `empty` samples no output counts."""

    def __init__(self, size: int, empty: int) -> None:
        super().__init__(size, torch.float64)
        self.empty = empty

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        sample = super().__getitem__(i)
        return sample | {"mask": sample["mask"] * (i >= self.empty)}


class PartlyEmpty(Toy):
    """The loss of a micro-batch without outputs is 0 / 0."""

    def __init__(self, empty: int) -> None:
        super().__init__(dtype="float64")
        self.empty = empty

    def data(self, split: str) -> Dataset:
        return Points(96, self.dtype) if split == "train" else Masked(SIZE, self.empty)


class WithMetrics(PartlyEmpty):
    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        error, mask = (model(batch["x"]) - batch["y"]).abs(), batch["mask"]
        return {
            "error": (self.loss(model, batch) * self.weight(batch), self.weight(batch)),
            "first": (error[:, 0].sum(), len(mask)),  # counts samples, whatever their weight
            "never": (error.sum() * math.nan, 0),
        }


def validated(place: Place, recipe: Toy) -> tuple[dict[str, float], list[Any]]:
    options, data = Options(max_steps=1), DataOptions(workers=0)
    trainer = Trainer(recipe, batch=12, micro_batch=2, options=options, data=data, place=place)
    trainer.fit()
    return trainer.validation, [p.detach().numpy() for p in trainer.module.parameters()]


@pytest.mark.parametrize("kind", [PartlyEmpty, WithMetrics])
def test_weight_0_adds_nothing(kind, tmp_path):
    """Of two ranks the first has 3 micro-batches of weight 0 and no other, the second has one of 3."""
    recipe = kind(empty=8)
    results = run_ranks(2, validated, recipe)
    model = recipe.model()
    for p, trained in zip(model.parameters(), results[0][1]):
        p.data = torch.from_numpy(trained)
    samples = [Masked(SIZE, 8)[i] for i in range(SIZE)]
    x, y, mask = (torch.stack([sample[key] for sample in samples]) for key in ("x", "y", "mask"))
    error = (model(x) - y).detach()
    loss = float((error**2 * mask).sum() / mask.sum())
    expected = {"val/loss": loss}
    if kind is WithMetrics:
        expected = {"val/error": loss, "val/first": float(error[:, 0].abs().mean())}
    assert [metrics for metrics, _ in results] == [pytest.approx(expected, rel=1e-12)] * 2


def refused(place: Place, recipe: Toy) -> str:
    with pytest.raises(DataError) as caught:
        validated(place, recipe)
    return str(caught.value)


class Listed(Toy):
    def __init__(self, batches: Any) -> None:
        super().__init__()
        self.batches = batches

    def data(self, split: str) -> Any:
        return super().data(split) if split == "train" else self.batches


class Nothing:
    def __iter__(self) -> Iterator[Any]:
        return iter([])


@pytest.mark.parametrize("recipe", [PartlyEmpty(empty=SIZE), Listed(Nothing())], ids=["weight 0", "no batch"])
def test_nothing_to_count_is_refused_on_every_rank(recipe, tmp_path):
    results = run_ranks(2, refused, recipe)
    assert results[0] == results[1]
    assert results[0].startswith("recipe.data('val'): gave no batch, or only batches of weight 0; return data ")


class Fails(Toy):
    """In the last validation, on some ranks, before or after the forward pass."""

    trains = False

    def __init__(self, ranks: tuple[int, ...] = (1,), after: bool = True) -> None:
        super().__init__()
        self.ranks, self.after = ranks, after

    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        fails = self.trains and torch.distributed.get_rank() in self.ranks
        if self.after or not fails:
            loss = self.loss(model, batch)
        if fails:
            raise OSError("no more memory on this GPU")
        return {"loss": (loss, 1)}


def failed(place: Place, recipe: Fails, callbacks: dict[str, Callback]) -> tuple[str, int, list[Path]]:
    options = Options(max_steps=2, checkpoint=CheckpointOptions(every_steps=None), run_dir="runs/r")
    trainer = Trainer(recipe, callbacks, batch=12, options=options, data=DataOptions(workers=0), place=place)
    recipe.trains = True
    with pytest.raises(Exception) as caught:
        trainer.fit()
    trainer.close()
    return f"{type(caught.value).__name__}: {caught.value}", trainer.step, checkpoints(Path("ckpt/r"))


def shard() -> dict[str, Callback]:
    return {"shard": Shard(3)}


OWN, OTHERS = "OSError: no more memory on this GPU", "DistError: rank 1 failed in validation"


@pytest.mark.parametrize(
    "recipe, callbacks, expected",
    [
        (Fails(), {"topk": GradCompress("topk")}, (OTHERS, OWN, OTHERS)),
        (Fails(), shard(), (OTHERS, OWN, OTHERS)),  # which the others hear at their next batch
        (Fails((0, 1, 2), after=False), shard(), (OWN, OWN, OWN)),
    ],
    ids=["replicas", "lockstep", "lockstep, all"],
)
def test_a_rank_that_fails_is_the_one_that_is_told_of_and_all_save(recipe, callbacks, expected, tmp_path):
    told, steps, saved = zip(*run_ranks(3, failed, recipe, callbacks), strict=True)
    assert told == expected
    assert set(steps) == {2} and [path.name for path in saved[0]] == ["step-00000002"]


def test_a_collective_that_fails_does_not_hide_why_validation_did(tmp_path, monkeypatch):
    trainer = Trainer(Toy(), batch=12, options=Options(max_steps=2), data=DataOptions(workers=0), place=Place())

    def gather(value: Any) -> Any:
        raise RuntimeError("[gloo/transport] Timed out")

    def metrics(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        raise OSError("no more memory on this GPU")

    trainer.recipe.metrics = metrics

    monkeypatch.setattr(trainer.ranks, "gather", gather)
    with pytest.raises(OSError, match="no more memory"):
        trainer.loop.parts.evaluator.evaluate(trainer.eval_model)
    trainer.close()


class Signalled(Toy):
    """Rank `rank` gets a signal in the first micro-batch of the validations of these steps, and hears it."""

    trainer: Trainer | None = None

    def __init__(self, rank: int, steps: tuple[int, ...]) -> None:
        super().__init__(dropout=0.1)
        self.rank, self.steps, self.seen = rank, steps, list[int]()

    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        trainer = self.trainer
        if trainer is not None:  # else it is made, and asks for the names
            self.seen.append(trainer.step)
        if trainer is not None and trainer.step in self.steps and trainer.rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 60
            while not trainer.signals.name and time.monotonic() < deadline:
                time.sleep(0.01)
        weight = self.weight(batch)
        return {"loss": (self.loss(model, batch) * weight, weight)}


def signalled(
    place: Place, name: str = "r", rank: int = 0, steps: tuple[int, ...] = (), resume: str | None = None
) -> tuple[str, int, list[int]]:
    """Why and where the run has stopped, and the step of each micro-batch that was validated."""
    recipe = Signalled(rank, steps)
    recipe.trainer = trainer = Trainer(
        recipe,
        {"metrics_file": MetricsFile(), "early_stop": EarlyStop(patience=2)},
        batch=12,
        micro_batch=2,
        options=Options(
            max_steps=4,
            validate_every=2,
            log_every_steps=1,
            run_dir=f"runs/{name}",
            resume=resume,
            checkpoint=CheckpointOptions(every_steps=None, keep_best="val/loss"),
        ),
        data=DataOptions(workers=0, shuffle_shards=5, shuffle_window=4),
        place=place,
    )
    trainer.fit()
    return trainer.stop_reason, trainer.step, recipe.seen


@pytest.mark.parametrize("world", [1, 2])
def test_a_signal_ends_a_validation_and_a_resume_makes_it_again(world, tmp_path):
    """Heard by the last rank alone, in the validation of step 2 and in that of the last step."""
    run_ranks(world, signalled, "straight")
    first = run_ranks(world, signalled, "r", world - 1, (2,))
    second = run_ranks(world, signalled, "r", world - 1, (4,), "auto")
    third = run_ranks(world, signalled, "r", world - 1, (), "auto")
    parts = len(third[-1][2])  # of the last rank, which all others waited for
    assert first[-1] == ("signal", 2, [2]) and second[-1] == ("signal", 4, [2] * parts + [4])
    assert third[-1] == ("max_steps", 4, [4] * parts) and parts > 1
    for ranks in (first, second, third):
        assert {stopped[:2] for stopped in ranks} == {ranks[0][:2]}
    assert lines(Path("runs/r")) == lines(Path("runs/straight"))
    summaries = [json.loads(Path("runs", name, "summary.json").read_text()) for name in ("r", "straight")]
    assert summaries[0]["best"] == summaries[1]["best"] and summaries[0]["val/loss"] == summaries[1]["val/loss"]
    assert weights("r", tmp_path, 4) == weights("straight", tmp_path, 4)


def test_a_stop_asked_for_in_a_step_leaves_its_validation_to_the_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begin = StepAgreement.begin

    def asked(agreement: StepAgreement, *own: Any) -> Callable[[], int]:
        total = begin(agreement, *own)
        agreement.requests = [agreement.state.step == 1, 0, 0]
        return total

    monkeypatch.setattr(StepAgreement, "begin", asked)
    assert signalled(Place()) == ("signal", 2, [])
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert signalled(Place(), resume="auto") == ("max_steps", 4, [2] * 7 + [4] * 7)


class Once:
    """A generator in an object's clothes."""

    def __init__(self) -> None:
        self.batches = (torch.utils.data.default_collate([Points(1, torch.float32)[0]]) for _ in range(2))

    def __iter__(self) -> Iterator[Any]:
        return self.batches


def test_data_for_one_validation_is_refused(tmp_path):
    message = refused(Place(), Listed(Once()))
    assert message.startswith("recipe.data('val'): a Once is used up by the first validation; return a list of batches")


def test_a_generator_is_refused_before_the_first_step(tmp_path):
    message = refused(Place(), Listed(iter([])))
    assert message.startswith("recipe.data('val'): a list_iterator is used up by the first validation; return a list ")
    assert not (tmp_path / "runs").exists()


class Rightness(Toy):
    def metrics(self, model, batch):
        return {"loss": (self.loss(model, batch) * len(batch["x"]), len(batch["x"])), "right": (batch["x"].sum(), 0)}


@pytest.mark.parametrize("recipe", [Toy, Rightness])
@pytest.mark.parametrize("place", ["keep_best", "early_stop"])
def test_a_metric_that_validation_does_not_give_is_refused_before_the_first_step(recipe, place, tmp_path):
    callbacks = {"early_stop": EarlyStop("val/los")} if place == "early_stop" else {}
    best = "max val/rihgt" if place == "keep_best" else None
    options = Options(max_steps=2, validate_every=1, checkpoint=CheckpointOptions(keep_best=best))
    key = {"keep_best": "trainer.checkpoint.keep_best=val/rihgt", "early_stop": "callbacks.early_stop.metric=val/los"}
    near = "val/right" if recipe is Rightness and place == "keep_best" else "val/loss"
    with pytest.raises(ConfigError, match=f"^{re.escape(key[place])}: validation gives no such metric; .*{near}"):
        Trainer(recipe(), callbacks, batch=12, options=options, data=DataOptions(workers=0))


class SomeValidation(Toy):
    def __init__(self, size: int) -> None:
        super().__init__(dtype="float64")
        self.size = size

    def data(self, split: str) -> Dataset:
        return Points(96 if split == "train" else self.size, self.dtype)


class SomeMetrics(SomeValidation):
    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        close = (model(batch["x"]) - batch["y"]).abs() < 0.5
        return {
            "close": (close.sum(), close.numel()),
            "loss": (self.loss(model, batch) * self.weight(batch), self.weight(batch)),
        }


def trained(place: Place, kind: type[SomeValidation], size: int) -> tuple[dict[str, float], list[np.ndarray]]:
    trainer = Trainer(
        kind(size), batch=12, micro_batch=2, options=Options(max_steps=2), data=DataOptions(workers=0), place=place
    )
    trainer.fit()
    return trainer.validation, [p.detach().numpy() for p in trainer.module.parameters()]


@pytest.mark.parametrize("size", [2, 13])
def test_validation_over_ranks_is_one_pass_over_everything(size, tmp_path):
    """Samples count 1 to 4 outputs, so ranks and micro-batches weigh differently; of 2 samples one rank has none."""
    everything = {
        key: torch.stack([Points(size, torch.float64)[i][key] for i in range(size)]) for key in ("x", "y", "mask")
    }
    for kind in (SomeValidation, SomeMetrics):
        results = run_ranks(3, trained, kind, size)
        recipe = kind(size)
        model = recipe.model()
        for p, values in zip(model.parameters(), results[0][1]):
            p.data = torch.from_numpy(values)
        error = (model(everything["x"]) - everything["y"]).detach()
        expected = {"val/loss": float((error**2 * everything["mask"]).sum() / everything["mask"].sum())}
        if kind is SomeMetrics:
            expected["val/close"] = float((error.abs() < 0.5).double().mean())
        assert [metrics for metrics, _ in results] == [pytest.approx(expected, rel=1e-12)] * 3


class PartlyFrozen(Toy):
    def model(self) -> nn.Module:
        net = super().model()
        net.get_submodule("blocks.0").eval()
        return net


def test_validation_leaves_each_module_in_the_mode_it_had(tmp_path):
    trainer = Trainer(
        PartlyFrozen(), batch=12, options=Options(max_steps=1), data=DataOptions(workers=0), place=Place()
    )
    before = [module.training for module in trainer.module.modules()]
    trainer.fit()
    assert trainer.validated_step == 1
    assert [module.training for module in trainer.module.modules()] == before
    assert {True, False} == set(before)
