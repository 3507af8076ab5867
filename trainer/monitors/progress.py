"""Shows the progress of the run: a bar on a terminal, else a line for each logged step."""

import os
import sys
import time
from datetime import timedelta
from typing import Any

from trainer import timeouts
from trainer.callback import Callback, TrainerProtocol
from trainer.log import Terminal, log

SHOWN = {
    "train/loss": "loss {:.4g}",
    "train/lr": "lr {:.2e}",
    "perf/samples_per_s": "{:,.0f} samples/s",
    "perf/tokens_per_s": "{:,.0f} tokens/s",
    "perf/mfu": "mfu {:.1%}",
    "perf/peak_memory_gib": "peak {:.1f} GiB",
    "perf/peak_rss_gib": "peak {:.1f} GiB",
}
# Left out in this order if the terminal is too narrow.
OPTIONAL = ("time/step", "train/lr", "perf/peak_rss_gib", "perf/peak_memory_gib", "perf/mfu", "perf/tokens_per_s")

# Parts of a step that compute nothing, of which the largest is shown.
IDLE = {"data": "data", "upload": "upload", "communication": "waits", "callbacks": "callbacks"}
IDLE |= {"checkpoint": "checkpoint", "validation": "validation"}

SHORT_BAR = 11  # columns
BAR = 29  # columns of the long bar and the elapsed time


class Progress(Callback):
    def __init__(self) -> None:
        self.bar: Any = None

    def on_fit_start(self, trainer) -> None:
        self.shown_at = self.printed_at = time.monotonic()
        self.printed_step = trainer.step
        mpirun = "OMPI_COMM_WORLD_RANK" in os.environ  # mpirun gives ranks a terminal, wherever its own output goes
        if trainer.rank or mpirun or not sys.stdout.isatty():
            return
        from rich import progress as rich

        step, numbers = (rich.TextColumn("step"), rich.MofNCompleteColumn()), rich.TextColumn("{task.fields[numbers]}")
        left = rich.TextColumn("left"), rich.TimeRemainingColumn(elapsed_when_finished=False)
        self.narrow = (*step, numbers, *left)
        self.middle = (*step, rich.BarColumn(SHORT_BAR - 1), numbers, *left)
        self.wide = (*step, rich.BarColumn(20), numbers, rich.TimeElapsedColumn(), *left)
        self.bar = rich.Progress(*self.wide, transient=True)
        self.task = self.bar.add_task("", total=trainer.plan.max_steps, completed=trainer.step, numbers="")
        self.bar.start()
        Terminal.console = self.bar.console

    def on_step_end(self, trainer) -> None:
        if self.bar is not None:
            now = time.monotonic()
            if trainer.metrics:
                self.bar.update(self.task, completed=trainer.step, numbers=self._arrange(trainer))
            elif now - self.shown_at > timeouts.REFRESH_S:
                self.bar.update(self.task, completed=trainer.step)
                self.shown_at = now
        elif trainer.metrics:
            line = f"step {self._position(trainer)}  {describe(trainer.metrics)}{self._left(trainer)}"
            if trainer.rank:
                log.info("%s", line)  # a rank's log has times
            else:  # printed, since the log takes three times as long, and metrics.jsonl has the numbers
                print(line, flush=True)

    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        log.info(
            "step %s  %s", self._position(trainer), "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        )

    def on_fit_end(self, trainer) -> None:
        if self.bar is not None:
            self.bar.stop()
            Terminal.console = None

    def _arrange(self, trainer: TrainerProtocol) -> str:
        """Fit step, bar, loss, samples per second and time left into 80 columns; a wider terminal gets more."""
        metrics, text = dict(trainer.metrics), describe(trainer.metrics)
        n = len(str(trainer.plan.max_steps or trainer.step))
        room = self.bar.console.width - (len("step  left 0:00:00 ") + 2 * n + 1)
        if len(text) + BAR <= room:
            self.bar.columns = self.wide
            return text
        room -= SHORT_BAR + 2  # the time left may be 100:00:00
        for name in OPTIONAL:
            if len(text) > room and name in metrics:
                del metrics[name]
                text = describe(metrics)
        self.bar.columns = self.middle if len(text) <= room else self.narrow
        return text

    def _position(self, trainer: TrainerProtocol) -> str:
        return f"{trainer.step}/{trainer.plan.max_steps}" if trainer.plan.max_steps else str(trainer.step)

    def _left(self, trainer: TrainerProtocol) -> str:
        """Return the time left, at the pace since the line before."""
        now, done = time.monotonic(), trainer.step - self.printed_step
        pace, self.printed_at, self.printed_step = (now - self.printed_at) / done, now, trainer.step
        if not trainer.plan.max_steps:
            return ""
        return f"  {timedelta(seconds=round(pace * (trainer.plan.max_steps - trainer.step)))} left"


def describe(metrics: dict[str, float]) -> str:
    return "  ".join([*(form.format(metrics[name]) for name, form in SHOWN.items() if name in metrics), *lost(metrics)])


def lost(metrics: dict[str, float]) -> list[str]:
    """Return the share of the largest part of a step that computes nothing, from 1 % on, if the parts are known."""
    whole = metrics.get("time/step", 0.0)
    largest, shown = max((metrics.get(f"time/{name}", 0.0), shown) for name, shown in IDLE.items())
    return [f"{shown} {largest / whole:.0%}"] if largest >= 0.01 * whole > 0 else []
