"""How far a run is: what a checkpoint counts, and this process's clocks."""

import math
import time
from collections.abc import Collection
from typing import Any

from trainer.checkpoint.retention import parse_best

COUNTERS = {"step": int, "samples": int, "seconds": float, "validation": dict, "validated_step": int}


class TrainingState:
    """The position of a run in its data and in time, and its validations.

    Attributes:
        step: Steps that are done.
        samples: Samples that are done, which is the position in the data.
        seconds: Seconds of training, over all processes of the run, when they were last counted.
        lag: Steps by which the weights are behind `step`, while a callback defers them.
        validation: Metrics of the last validation, which was at `validated_step`.
        bests: Validations that were the best when they came, the newest last: metric, value and step.
        unwritten: Steps whose checkpoints could not be written, so that none of them is the best one to keep.
        loaded: `step` and `validated_step` of the checkpoint that was restored; None before that.
        started, saved_at, validated_at: Readings of `time.monotonic`. `started` is earlier by the seconds of previous
            processes.
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
        """Count seconds, and the time to the next checkpoint and validation, from now on."""
        now = time.monotonic()
        self.started, self.saved_at, self.validated_at = now - self.seconds, now, now

    def count_seconds(self) -> None:
        """Update `seconds`."""
        self.seconds = time.monotonic() - self.started

    @property
    def best(self) -> dict[str, Any]:
        """The best validation, or the best one whose checkpoint was written; empty without any."""
        return next((found for found in reversed(self.bests) if found.get("step") not in self.unwritten), {})

    def note_best(self, metric: str, before: dict[str, Any]) -> bool:
        """Record the last validation if it is better than the one `before`; return whether it is.

        Args:
            metric: A metric to minimise, or 'max NAME'. A record of another metric is replaced.
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
