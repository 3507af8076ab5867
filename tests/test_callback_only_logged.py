"""Hooks that act at logged steps are called at no others, and write what they would write if they were."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.runs import make
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.callback import UNLOGGED, Callback, only_logged
from trainer.loggers.events import Events
from trainer.loggers.metrics_file import MetricsFile
from trainer.loggers.progress import Progress
from trainer.loggers.tensorboard import TensorBoard
from trainer.monitors.advice.callback import Advice
from trainer.monitors.memory.callback import Memory
from trainer.monitors.step_timer import StepTimer
from trainer.monitors.throughput import Throughput

pytestmark = pytest.mark.usefixtures("tmp_path")

OBSERVERS = (Progress, TensorBoard, MetricsFile, StepTimer, Events, Throughput, Memory, Advice)


class Each(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, trainer) -> None:
        self.steps.append(trainer.step)


class Logged(Each):
    @only_logged
    def on_step_end(self, trainer) -> None:
        assert trainer.metrics
        super().on_step_end(trainer)


class Again(Logged):
    """A hook that is written anew is called after each step."""

    def on_step_end(self, trainer) -> None:
        Each.on_step_end(self, trainer)


def test_a_marked_hook_follows_logged_steps_alone_and_in_its_place():
    callbacks = {"a": Each(), "b": Logged(), "c": Again()}
    trainer = make(callbacks=callbacks, max_steps=7, log_every_steps=3)
    order = [getattr(call, "__self__", None) for call in trainer.hooks["on_step_end"]]
    assert order == list(callbacks.values())
    trainer.fit()
    each = [1, 2, 3, 4, 5, 6, 7]
    assert [callback.steps for callback in callbacks.values()] == [each, [3, 6, 7], each]


def written(called_each_step: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> tuple[Any, ...]:
    """Return names, steps and all that no clock decides, of each file and of the terminal."""
    run = f"runs/{called_each_step}"
    callbacks: dict[str, Callback] = {observer.__name__: observer() for observer in OBSERVERS}
    trainer = make(callbacks=callbacks, max_steps=7, log_every_steps=3, validate_every=4, run_dir=run)
    if called_each_step:  # as if each hook asked whether the step has numbers

        def asks(call: Any) -> Any:
            return lambda trainer: call(trainer) if trainer.metrics else None

        every = trainer.hooks["on_step_end"]
        trainer.hooks[UNLOGGED] = [asks(call) if hasattr(call, "only_logged") else call for call in every]
    capsys.readouterr()
    trainer.fit()
    printed = [line.split()[:4] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    exact = [{k: v if k.startswith(("train/", "val/", "step", "samples")) else 0 for k, v in x.items()} for x in lines]
    (events,) = Path(run, "tensorboard").iterdir()
    board = EventAccumulator(str(events)).Reload()
    scalars = {tag: [event.step for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    happened = [json.loads(line)["event"] for line in Path(run, "events.jsonl").read_text().splitlines()]
    happened[1:] = sorted(happened[1:])  # a checkpoint is told of when the disk has it
    times = [json.loads(line)["step"] for line in Path(run, "step_times.jsonl").read_text().splitlines()]
    return printed, exact, scalars, happened, times


def test_the_default_observers_write_what_they_would_if_they_were_called_at_each_step(monkeypatch, capsys):
    one, other = (written(each, monkeypatch, capsys) for each in (True, False))
    assert one == other
    printed, exact, scalars, happened, times = other
    assert len(printed) >= 3 and [line["step"] for line in exact] == [3, 4, 6, 7, 7]
    assert scalars["train/loss"] == times == [3, 6, 7] and "perf/samples_per_s" in scalars
    assert happened[0] == "start" and "validation" in happened
