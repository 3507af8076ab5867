"""The progress of a run: the counters in a checkpoint, and this process's clocks."""

import math
import time
from collections.abc import Collection
from typing import Any

from trainer.checkpoint.retention import parse_best

COUNTERS = {"step": int, "samples": int, "seconds": float, "validation": dict, "validated_step": int}


class TrainingState:
    """A run's progress in steps, data and time, and its validations.

    Attributes:
        step: Completed steps.
        samples: Samples trained on, which is the position in the data.
        seconds: Training time over all processes of the run, as of the last `count_seconds`.
        lag: Steps by which the weights lag behind `step` while a callback defers the update.
        validation: Metrics of the last validation, at step `validated_step`.
        bests: Validations that were the best so far when they ran, newest last: metric, value and step.
        unwritten: Steps whose checkpoints could not be written, and so can't be kept as the best one.
        loaded: `step` and `validated_step` of the restored checkpoint; None before the restore.
        started, saved_at, validated_at: Readings of `time.monotonic`. `started` is shifted back by the seconds of
            previous processes.
    """

    def __init__(self) -> None:
        self.step, self.samples, self.seconds, self.lag = 0, 0, 0.0, 0
        self.validation: dict[str, float] = {}
        self.validated_step = -1
        self.bests: list[dict[str, Any]] = []
        self.unwritten: Collection[int] = ()
        self.loaded: tuple[int, int] | None = None
        self.start_clocks()

    def start_clocks(self) -> None:
        """Start the clocks of training, of the next checkpoint and of the next validation."""
        now = time.monotonic()
        self.started, self.saved_at, self.validated_at = now - self.seconds, now, now

    def count_seconds(self) -> None:
        """Update `seconds`."""
        self.seconds = time.monotonic() - self.started

    @property
    def best(self) -> dict[str, Any]:
        """The best validation whose checkpoint, if one was due, could be written; empty if there is none."""
        return next((found for found in reversed(self.bests) if found.get("step") not in self.unwritten), {})

    def note_best(self, metric: str, before: dict[str, Any]) -> bool:
        """Record the last validation if it is better than `before`; return whether it is.

        Args:
            metric: The metric to minimise, or 'max NAME' to maximise. A record of another metric is replaced.
        """
        name, sign = parse_best(metric)
        value = self.validation.get(name, math.nan)
        worse = before.get("metric") == metric and sign * value >= sign * before["value"]
        if not math.isfinite(value) or worse:
            return False
        self.bests.append({"metric": metric, "value": value, "step": self.step})
        return True

    def state_dict(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in COUNTERS}, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.bests, self.loaded = [state["best"]], (self.step, self.validated_step)
