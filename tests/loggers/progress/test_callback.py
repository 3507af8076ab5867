"""Plain lines with the run's numbers where there is no terminal; a bar that puts everything back where there is one."""

import io
import re
import sys
from types import SimpleNamespace

import pytest
from support.ranks import run_ranks
from support.runs import make
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.config.options import DataOptions, Options
from trainer.log import Terminal
from trainer.loggers.progress import Progress
from trainer.loggers.progress import callback as module
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


def test_plain_lines(tmp_path, capsys):
    record = Record()
    run(record=record)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [re.sub(r"  \d+:\d\d:\d\d left$", "", line) for line in printed[1:]] == record.lines
    assert re.fullmatch(r"step 1/6  loss \d[\d.]+  lr 1\.00e-03", printed[0])
    assert [int(line[5]) for line in printed] == [1, 2, 3, 4, 6, 6]
    assert [line.endswith(" left") for line in printed] == [False, True, False, True, True, False]


def test_the_first_logged_steps_show_no_part_of_a_step(tmp_path, capsys):
    """They pay for imports and new files: almost all of their time is the callbacks'."""

    class Busy(Callback):
        role = Role.MEASURE

        def on_step_end(self, trainer) -> None:
            if trainer.metrics:
                trainer.metrics |= {"time/step": 1.0, "time/callbacks": 0.98}

    run(busy=Busy())
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert ["callbacks 98%" in line for line in printed] == [False, False, False, False, True, False]


def first_line(place: Place, max_steps: int) -> tuple[list[str], float]:
    """What rank 0 prints of a first step that is not logged, and its loss by hand."""
    losses: list[float] = []

    class Losses(Callback):
        def on_step_end(self, trainer) -> None:
            own = sum(loss.item() * n for loss, n in zip(trainer.losses, trainer.data.weights, strict=True))
            sums = trainer.ranks.gather([own, sum(trainer.data.weights)])
            losses.append(sum(each[0] for each in sums) / sum(each[1] for each in sums))

    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda text, **_: printed.append(text))
        callbacks = {"progress": Progress(), "losses": Losses()}
        make(callbacks=callbacks, max_steps=max_steps, resume="auto", place=place).fit()
    return [line.partition("  lr")[0] for line in printed if line.startswith("step ")], losses[0]


def test_the_first_step_of_each_start_has_the_loss_of_all_ranks(tmp_path):
    """Logged are steps 3 and 6 alone."""
    for first, last in ((1, 3), (4, 6)):
        (printed, loss), *_ = run_ranks(2, first_line, last)
        assert printed[0] == f"step {first}/{last}  loss {loss:.4g}" and printed[1].startswith(f"step {last}/{last}")


@pytest.mark.parametrize(
    ("max_steps", "first", "step", "seconds", "line"),
    [
        (100, 0, 25, 30.0, "step 25/100  loss 1  0:01:30 left"),  # 1.2 s a step, 75 to go
        (100, 50, 75, 100.0, "step 75/100  loss 1  0:01:40 left"),  # steps before a resume took no time of this run
        (10_000, 0, 2, 20.0, "step 2/10000  loss 1  1 day, 3:46:20 left"),
        (10_000, 0, 1, 10.0, "step 1/10000  loss 1"),  # the first step takes longer than others
        (10**18, 0, 25, 25.0, f"step 25/{10**18}  loss 1  3e+10 years left"),
        (None, 0, 25, 30.0, "step 25  loss 1"),
    ],
)
def test_the_time_left(max_steps, first, step, seconds, line, monkeypatch, capsys):
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
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
    monkeypatch.setattr(module.log, "info", lambda form, *values: told.append(form % values))
    trainer = SimpleNamespace(rank=1, step=0, plan=SimpleNamespace(max_steps=None), metrics={"train/loss": 1.0})
    callback = Progress()
    callback.on_fit_start(trainer)
    trainer.step = 25
    callback.on_step_end(trainer)
    assert (told, capsys.readouterr().out) == (["step 25  loss 1"], "")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Fails(Callback):
    def on_step_end(self, trainer) -> None:
        if trainer.step == 4:
            raise ZeroDivisionError


@pytest.mark.parametrize("fails", [False, True])
def test_a_bar_on_a_terminal(fails, tmp_path, monkeypatch):
    """It shows step and loss, lines are printed above it, and then the terminal is as before, also after an error."""
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
    step, line = (4, record.lines[0]) if fails else (6, record.lines[3])
    assert f"{step}/6" in shown and line.partition("  ")[2] in shown
    assert record.lines[1] in shown  # the validation's line
    assert Terminal.console is None
    assert screen.getvalue().rstrip().count("\x1b[?25l") == screen.getvalue().count("\x1b[?25h") == 1  # the cursor


class OnRank0(Callback):
    """A number of one rank alone, at a step that is not logged."""

    role = Role.MEASURE

    def on_step_end(self, trainer) -> None:
        if trainer.rank == 0:
            trainer.metrics["own/one"] = 1.0


def with_a_number_of_its_own(place: Place) -> int:
    trainer = make(callbacks={"own": OnRank0(), "progress": Progress()}, place=place, max_steps=3, log_every_steps=50)
    trainer.fit()
    return trainer.step


def test_the_first_steps_loss_waits_for_no_rank_that_does_not_come(tmp_path):
    assert run_ranks(2, with_a_number_of_its_own) == [3, 3]
