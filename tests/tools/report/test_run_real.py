"""Reports of runs that were really trained: from their first line, after a crash, after a resume."""

import json
from pathlib import Path

import pytest
from support.runs import make
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.loggers.events import Events
from trainer.loggers.metrics_file import MetricsFile
from trainer.monitors.throughput import Throughput
from trainer.tools.report.page import make_page
from trainer.tools.report.run import Run, read_run


class Crash(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer) -> None:
        if trainer.step == self.step:
            raise RuntimeError("a link <b>broke</b>")


def train(**options) -> None:
    own = {"metrics_file": MetricsFile(), "events": Events(), "throughput": Throughput()}
    make(Toy(), own | options.pop("callbacks", {}), log_every_steps=1, validate_every=2, **options).fit()


def seen() -> tuple[Run, str]:
    run = read_run(Path("runs/r"), "r", 1000)
    return run, make_page([run])


def test_a_run_that_ends_crashes_and_resumes(tmp_path):
    with pytest.raises(RuntimeError):
        train(callbacks={"z_crash": Crash(3)}, max_steps=6)
    run, page = seen()
    assert (run.state, run.last_step) == ("crashed", 3)
    assert "a link &lt;b&gt;broke&lt;/b&gt;" in page and "<b>broke" not in page
    train(resume="auto", max_steps=6)
    run, page = seen()
    assert (run.state, run.last_step, run.error) == ("finished", 6, "")
    kinds = [event["event"] for event in run.events if event["event"] not in ("checkpoint", "validation")]
    assert kinds == ["start", "crash", "resume", "stop"]
    lines = [json.loads(line) for line in Path("runs/r/metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert run.metrics["train/loss"].ranges.mean.tolist() == losses and len(losses) == 6
    assert run.metrics["val/loss"].ranges.steps.tolist() == [2, 4, 6]
    assert {"train/loss", "val/loss", "perf/samples_per_s"} <= set(run.metrics)
    assert run.notes == ["config.yaml: is missing"]  # only the command writes one
    assert "Loss" in page and "Samples per second" in page


def test_a_run_that_is_looked_at_while_it_trains(tmp_path):
    found: list[tuple[str, int]] = []

    class Look(Callback):
        def on_step_end(self, trainer) -> None:
            run, page = seen()
            assert "running or killed" in page
            found.append((run.state, run.last_step))

    train(callbacks={"look": Look()}, max_steps=3)
    assert [state for state, _ in found] == ["running or killed"] * 3 and found[-1][1] >= 2
