"""When a metric has stopped improving, and what becomes of that across a resume."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.ranks import run_ranks
from toy_recipe import Toy

from trainer.callbacks.early_stop import EarlyStop
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError
from trainer.log import log
from trainer.loggers.metrics_file import MetricsFile
from trainer.optim.factories import sgd
from trainer.process.environment import Place
from trainer.trainer import Trainer


class Stops:
    """Stands for a trainer that validates."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.plan = SimpleNamespace(validate_every=5, validation=[])

    def stop(self, reason: str) -> None:
        self.reasons.append(reason)


def stopped_at(callback: EarlyStop, values: list[float]) -> int | None:
    trainer = Stops()
    for n, value in enumerate(values, start=1):
        trainer.step = 5 * n
        callback.on_validation_end(trainer, {"other": 0.0, callback.metric: value})
        if trainer.reasons:
            return n
    return None


@pytest.mark.parametrize(
    ("knobs", "values", "stop"),
    [
        ({"patience": 2}, [3, 2, 1, 1, 1], 5),
        ({"patience": 2}, [3, 2, 4, 1.9, 4, 4], 6),  # an improvement starts the count again
        ({"patience": 1}, [3, 2, 1], None),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.9, 2.6], 3),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.9, 2.4, 2.3, 1.8], None),  # each against the best, not the last
        ({"patience": 2, "mode": "max"}, [0.1, 0.2, 0.15, 0.2], 4),
        ({"patience": 2}, [1, float("nan"), float("nan")], 3),
    ],
)
def test_by_hand(knobs, values, stop):
    assert stopped_at(EarlyStop(metric="val/x", **knobs), values) == stop


@pytest.mark.parametrize("least", [-1, float("nan"), float("inf")])
def test_a_least_change_that_is_none_is_refused(least):
    with pytest.raises(ConfigError, match=rf"^callbacks.early_stop.min_delta={least}: must be "):
        EarlyStop(min_delta=least)


def test_the_count_survives_a_resume():
    first = EarlyStop(patience=3)
    assert stopped_at(first, [1.0, 2.0, 2.0]) is None
    second = EarlyStop(patience=3)
    second.load_state_dict(first.state_dict())
    assert stopped_at(second, [1.5]) == 1


@pytest.mark.parametrize(("mode", "values"), [("min", [3.0, 1.25, 2.0]), ("max", [0.0, 1.25, 1.0])])
def test_the_best_value_and_its_step_are_told(mode, values):
    callback, trainer = EarlyStop(metric="val/x", patience=1, mode=mode), Stops()
    for trainer.step, value in zip((10, 20, 30), values, strict=True):
        callback.on_validation_end(trainer, {"val/x": value})
    assert trainer.reasons == ["early_stop: val/x has not improved for 1 validations; its best was 1.25 at step 20"]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_metric_that_was_never_finite_has_no_best(mode):
    callback, trainer = EarlyStop(metric="val/x", patience=2, mode=mode), Stops()
    for trainer.step, value in ((10, float("nan")), (20, float("inf" if mode == "min" else "-inf"))):
        callback.on_validation_end(trainer, {"val/x": value})
    assert trainer.reasons == ["early_stop: val/x has not improved for 2 validations; it was never finite"]


def test_accuracy_and_the_default_mode(monkeypatch):
    lines = []
    monkeypatch.setattr(log, "warning", lambda text, *args: lines.append(text % args))
    EarlyStop(metric="val/accuracy").on_fit_start(Stops())
    line = "takes smaller as better, and larger is usual for val/accuracy; give"
    assert lines == [f"callbacks.early_stop.mode=min: {line} callbacks.early_stop.mode=max"]


def test_a_state_from_before_steps_were_kept():
    callback, trainer = EarlyStop(patience=1), Stops()
    callback.load_state_dict({"best": 0.5, "bad": 1})
    callback.on_fit_start(trainer)
    assert trainer.reasons == ["early_stop: val/loss has not improved for 1 validations; its best was 0.5"]


def test_the_summary_has_the_loss_of_a_step_that_is_not_logged(tmp_path):
    assert run(Place())[0] == 9  # log_every_steps is 50
    assert json.loads(Path("runs/r/summary.json").read_text())["train/loss"] > 0


class Unvalidated(Toy):
    def data(self, split: str) -> Any:
        return super().data(split) if split == "train" else None


@pytest.mark.parametrize(
    ("recipe", "every", "reason"),
    [
        (Toy, None, "this run validates only at its end; give trainer.validate_every"),
        (Unvalidated, None, "recipe.data('val') is None; return validation data"),
    ],
)
def test_without_validation_it_is_refused(recipe, every, reason, tmp_path):
    options = Options(max_steps=4, validate_every=every)
    with pytest.raises(ConfigError, match=f"^callbacks.early_stop.metric=val/loss: {re.escape(reason)}"):
        Trainer(recipe(), {"early_stop": EarlyStop()}, batch=12, options=options, place=Place()).fit()


def run(place: Place, patience: int = 2, resume: str | None = None) -> tuple[int, str]:
    trainer = Trainer(
        Toy(),
        {"early_stop": EarlyStop(patience=patience, min_delta=10.0), "metrics_file": MetricsFile()},
        sgd,
        batch=12,
        options=Options(max_steps=20, validate_every=3, run_dir="runs/r", resume=resume),
        data=DataOptions(workers=0),
        place=place,
    )
    trainer.fit()
    return trainer.step, trainer.stop_reason


STOP = r"early_stop: val/loss has not improved for 2 validations; its best was (\d\.\d+) at step 3"


def test_all_ranks_stop_at_the_same_step(tmp_path):
    """The first validation improves on nothing, the next two do not improve by 10."""
    (step, reason), *others = run_ranks(3, run)
    assert others == [(step, reason)] * 2
    lines = map(json.loads, Path("runs/r/metrics.jsonl").read_text().splitlines())
    best = next(line["val/loss"] for line in lines if line["step"] == 3)
    assert step == 9 and re.fullmatch(STOP, reason)[1] == f"{best:.4g}"


def test_a_run_that_it_stopped_stays_stopped_when_resumed(tmp_path):
    stop = run(Place())
    assert stop[0] == 9 and re.fullmatch(STOP, stop[1])
    assert run(Place(), resume="auto") == stop
    assert run(Place(), patience=3, resume="auto")[0] == 12
