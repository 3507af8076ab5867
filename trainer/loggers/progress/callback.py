"""Shows the progress of the run: a bar on a terminal, curves in a notebook, else a line for each logged step."""

import os
import sys
import time
from typing import Any

from trainer import timeouts
from trainer.callback import Callback
from trainer.context import Context
from trainer.log import Terminal, log
from trainer.loggers.progress.line import Moment, clock, describe, epoch_of
from trainer.process.notebook import in_notebook

UNUSUAL = 2  # logged steps whose parts are not shown: imports and first files take most of their time


class Progress(Callback):
    def __init__(self) -> None:
        self.bar: Any = None

    def on_fit_start(self, trainer) -> None:
        self.shown_at = self.printed_at = time.monotonic()
        self.first = self.printed_step = trainer.step
        self.metrics: dict[str, float] = {}  # those shown last
        self.logged = 0  # steps
        mpirun = "OMPI_COMM_WORLD_RANK" in os.environ  # mpirun gives ranks a terminal, wherever its own output goes
        if trainer.rank == 0 and in_notebook():
            from trainer.loggers.progress.panel import Panel as Shown
        elif trainer.rank == 0 and not mpirun and sys.stdout.isatty():
            from trainer.loggers.progress.bar import Bar as Shown
        else:
            return

        def look(elapsed_s: float, left_s: float | None) -> Moment:
            return self._moment(trainer, elapsed_s, left_s)

        self.bar = Shown(look, trainer.plan.max_steps, trainer.step)
        Terminal.console = self.bar.console

    def on_step_end(self, trainer) -> None:
        shows = trainer.metrics
        if "train/loss" not in shows and trainer.step == self.first + 1:  # so on all ranks
            shows = self._first_loss(trainer)
        elif shows:
            self.logged += 1
            if self.logged <= UNUSUAL:
                shows = {name: value for name, value in shows.items() if name != "time/step"}
        self.metrics = shows or self.metrics
        if self.bar is not None:
            if shows:
                self.bar.note(trainer.step, shows)
            now = time.monotonic()
            if now - self.shown_at > timeouts.REFRESH_S:
                self.bar.advance(trainer.step)
                self.shown_at = now
        elif shows:
            line = f"step {self._position(trainer)}  {describe(shows)}{self._left(trainer)}"
            if trainer.rank:
                log.info("%s", line)  # a rank's log has times
            else:  # printed, since the log takes three times as long, and metrics.jsonl has the numbers
                print(line, flush=True)

    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        log.info("step %s  %s", self._position(trainer), numbers)
        if self.bar is not None:
            self.bar.note(trainer.step, metrics)

    def on_fit_end(self, trainer) -> None:
        if self.bar is not None:
            self.bar.stop(trainer.step)
            Terminal.console = None

    def _moment(self, trainer: Context, elapsed_s: float, left_s: float | None) -> Moment:
        """Return what to draw. Called in the drawing thread."""
        plan = trainer.plan
        last = plan.max_steps and plan.samples_at(plan.max_steps)
        epoch = epoch_of(trainer.samples, plan.epoch_samples, last)
        return Moment(trainer.step, plan.max_steps, epoch, Terminal.doing, self.metrics, elapsed_s, left_s)

    def _first_loss(self, trainer: Context) -> dict[str, float]:
        """Measure the first step's loss if it is not logged: the next numbers may be minutes away.

        Waits for the device; a collective.
        """
        loss = trainer.train_loss.measure(trainer.losses, trainer.data.weights, trainer.step)
        return {**loss, "train/lr": trainer.optimizer.param_groups[0]["lr"]}

    def _position(self, trainer: Context) -> str:
        return f"{trainer.step}/{trainer.plan.max_steps}" if trainer.plan.max_steps else str(trainer.step)

    def _left(self, trainer: Context) -> str:
        """Return the time left at the pace since the previous line. A process's first step has no pace."""
        now, done = time.monotonic(), trainer.step - self.printed_step
        pace, self.printed_at, self.printed_step = (now - self.printed_at) / done, now, trainer.step
        if not trainer.plan.max_steps or trainer.step == self.first + 1:
            return ""
        return f"  {clock(pace * (trainer.plan.max_steps - trainer.step))} left"
