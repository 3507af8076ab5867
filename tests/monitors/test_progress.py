"""Plain lines with the run's numbers where there is no terminal; a bar that puts everything back where there is one."""

import io
import re
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.config.options import DataOptions, Options
from trainer.log import Terminal
from trainer.monitors import progress
from trainer.monitors.progress import Progress, describe
from trainer.process.environment import Place
from trainer.trainer import Trainer


class Record(Callback):
    role = Role.MEASURE

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_step_end(self, trainer) -> None:
        if trainer.metrics:
            loss, lr = trainer.metrics["train/loss"], trainer.metrics["train/lr"]
            self.lines.append(f"step {trainer.step}/6  loss {loss:.4g}  lr {lr:.2e}")

    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        self.lines.append(f"step {trainer.step}/6  val/loss {metrics['val/loss']:.4g}")


def run(**callbacks: Callback) -> None:
    Trainer(
        Toy(),
        {"progress": Progress(), **callbacks},
        batch=12,
        options=Options(max_steps=6, log_every_steps=2, validate_every=3),
        data=DataOptions(workers=0),
        place=Place(),
    ).fit()


def test_plain_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    record = Record()
    run(record=record)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [re.sub(r"  \d+:\d\d:\d\d left$", "", line) for line in printed] == record.lines
    assert [int(line[5]) for line in printed] == [2, 3, 4, 6, 6]
    assert [line.endswith(" left") for line in printed] == [True, False, True, True, False]


def test_the_numbers_of_a_line():
    numbers = {
        "train/loss": 2.34567, "train/lr": 1.5e-4, "train/grad_norm": 3.0, "perf/samples_per_s": 1234.6,
        "perf/tokens_per_s": 158029.0, "perf/mfu": 0.4321, "perf/peak_rss_gib": 1.26,
    }  # fmt: skip
    assert describe(numbers) == "loss 2.346  lr 1.50e-04  1,235 samples/s  158,029 tokens/s  mfu 43.2%  peak 1.3 GiB"


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        ({"data": 0.5, "communication": 0.25}, "  data 12%"),
        ({"data": 0.25, "communication": 0.9}, "  waits 22%"),
        ({"validation": 2.0}, "  validation 50%"),
        ({"data": 0.03}, ""),
    ],
)
def test_the_largest_part_of_a_step_that_computes_nothing(parts, shown):
    times = {f"time/{name}": seconds for name, seconds in parts.items()}
    assert describe({"train/loss": 1.0, "time/step": 4.0, "time/forward": 3.0, **times}) == f"loss 1{shown}"
    assert describe({"train/loss": 1.0, "time/step": 0.0}) == "loss 1"


@pytest.mark.parametrize(
    ("max_steps", "first", "step", "seconds", "line"),
    [
        (100, 0, 25, 30.0, "step 25/100  loss 1  0:01:30 left"),  # 1.2 s a step, 75 to go
        (100, 50, 75, 100.0, "step 75/100  loss 1  0:01:40 left"),  # steps before a resume took no time of this run
        (10_000, 0, 1, 10.0, "step 1/10000  loss 1  1 day, 3:46:30 left"),
        (None, 0, 25, 30.0, "step 25  loss 1"),
    ],
)
def test_the_time_left(max_steps, first, step, seconds, line, monkeypatch, capsys):
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    trainer = SimpleNamespace(
        rank=0, step=first, plan=SimpleNamespace(max_steps=max_steps), metrics={"train/loss": 1.0}
    )
    callback = Progress()
    callback.on_fit_start(trainer)
    clock.now += seconds
    trainer.step = step
    callback.on_step_end(trainer)
    assert capsys.readouterr().out == f"{line}\n"


def test_lines_of_other_ranks_have_the_time(monkeypatch, capsys):
    """As all lines of their logs, which `print` would not give them."""
    told: list[str] = []
    monkeypatch.setattr(progress.log, "info", lambda form, *values: told.append(form % values))
    trainer = SimpleNamespace(rank=1, step=0, plan=SimpleNamespace(max_steps=None), metrics={"train/loss": 1.0})
    callback = Progress()
    callback.on_fit_start(trainer)
    trainer.step = 25
    callback.on_step_end(trainer)
    assert (told, capsys.readouterr().out) == (["step 25  loss 1"], "")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


METRICS = {
    "train/loss": 2.34567, "train/lr": 1.5e-4, "perf/samples_per_s": 158_029.0, "perf/tokens_per_s": 20_227_712.0,
    "perf/mfu": 0.4321, "perf/peak_memory_gib": 61.74, "time/step": 2.0, "time/communication": 0.46,
}  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "there"),
    [
        (72, r"loss 2\.346  158,029 samples/s"),
        (80, r" {11}loss 2\.346  158,029 samples/s"),  # after a bar that has not begun
        (112, r" {11}loss .* samples/s  20,227,712 tokens/s  mfu 43\.2%"),
        (130, r" {11}loss .* samples/s  20,227,712 tokens/s  mfu 43\.2%  peak 61\.7 GiB"),
        (143, r" {11}loss .*  lr 1\.50e-04  158,029 samples/s  20,227,712 tokens/s  mfu 43\.2%  peak 61\.7 GiB"),
        (180, r"\S+ +loss .* mfu 43\.2%  peak 61\.7 GiB  waits 23% \d+:\d\d:\d\d"),
    ],
)
def test_what_a_terminal_has_room_for(columns, there, monkeypatch):
    """Step, bar, loss, speed and time left have a place even in 80 columns."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", Screen())
    monkeypatch.setattr("rich._console", None)  # else it is as wide as in the test before
    trainer = SimpleNamespace(rank=0, step=0, plan=SimpleNamespace(max_steps=1_000_000), metrics={})
    callback, clock = Progress(), SimpleNamespace(now=0.0)
    callback.on_fit_start(trainer)
    callback.bar.get_time, callback.bar.speed_estimate_period = lambda: clock.now, 1e6
    for task in callback.bar.tasks:
        task._get_time = callback.bar.get_time
    callback.bar.reset(callback.task)
    for clock.now in (1800.0, 3600.0):
        trainer.step, trainer.metrics = trainer.step + 12_500, METRICS
        callback.on_step_end(trainer)
    screen = Console(file=io.StringIO(), width=columns)
    screen.print(callback.bar.get_renderable())
    callback.on_fit_end(trainer)
    assert isinstance(screen.file, io.StringIO)
    assert re.fullmatch(rf"step +25000/1000000 {there} left 39:00:00\s*", screen.file.getvalue()), (
        screen.file.getvalue()
    )


class Fails(Callback):
    def on_step_end(self, trainer) -> None:
        if trainer.step == 4:
            raise ZeroDivisionError


@pytest.mark.parametrize("fails", [False, True])
def test_a_bar_on_a_terminal(fails, tmp_path, monkeypatch):
    """It shows step and loss, lines are printed above it, and then the terminal is as before, also after an error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    screen, record = Screen(), Record()
    monkeypatch.setattr(sys, "stdout", screen)
    if fails:
        with pytest.raises(ZeroDivisionError):
            run(record=record, fails=Fails())
    else:
        run(record=record)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    step, line = (2, record.lines[0]) if fails else (6, record.lines[3])
    assert f"{step}/6" in shown and line.partition("  ")[2] in shown
    assert record.lines[1] in shown  # the validation's line
    assert Terminal.console is None
    assert screen.getvalue().rstrip().count("\x1b[?25l") == screen.getvalue().count("\x1b[?25h") == 1  # the cursor
