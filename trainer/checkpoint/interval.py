"""Computes the interval between checkpoints that loses the least time, from their cost and from the run's failures.

Young 1974, "A first order approximation to the optimum checkpoint interval", gives `sqrt(2 * stall * mtbf)`, where
`mtbf` is the mean time between failures. Daly adds terms for a stall that is not small compared to it. See Daly 2006,
"A higher order estimate of the optimum checkpoint interval for restart dumps" (doi:10.1016/j.future.2004.11.016).
Both model failures as a Poisson process.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from trainer.log import log

FIRST = 60.0  # until a checkpoint has been measured
LEAST = 60.0  # a shorter interval would load the storage for little gain
DEVICE_HOURS = 54 * 24 * 16_384 / 419  # for each failure: Llama 3, arXiv:2407.21783, section 3.3.4
RUN_HOURS = 7 * 24.0  # for each failure of anything else: software, power, users; a guess without a source
CHANGED = 2.0  # factor by which the interval must change before it is logged again
SMOOTHING = 0.5  # weight of the past in the mean of measured times
MEASURED = ("stall_s", "write_s", "restart_s", "failures")


def young(stall_s: float, mtbf_s: float) -> float:
    """Return Young's interval in seconds, from the end of a checkpoint to the start of the next."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly(stall_s: float, mtbf_s: float) -> float:
    """Return Daly's interval in seconds, from the end of a checkpoint to the start of the next."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    x = math.sqrt(stall_s / (2 * mtbf_s))
    return young(stall_s, mtbf_s) * (1 + x / 3 + x * x / 9) - stall_s


def lost(interval_s: float, stall_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the share of time spent on checkpoints, restarts and repeated work, by Daly's model."""
    each = (interval_s + stall_s) / mtbf_s
    if each + restart_s / mtbf_s > 700:  # no interval ends before the next failure
        return 1.0
    return 1 - interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(each))


def prior_s(devices: int) -> float:
    """Return the assumed mean seconds between failures of a run that has had none."""
    return 3600 / (devices / DEVICE_HOURS + 1 / RUN_HOURS)


class Interval:
    """The interval of `trainer.checkpoint.every=auto`, from this run's own numbers. Without `auto` it only measures.

    Until its first failure, a run assumes `prior_s`. A supervisor records failures in `logs`, and whether a machine
    caused them.
    """

    def __init__(self, auto: bool, devices: int, logs: Path) -> None:
        self.auto, self.devices, self.logs = auto, devices, logs
        self.stall_s = self.write_s = self.restart_s = 0.0
        self.failures, self.made_at = 0, time.monotonic()
        self.seconds, self.said = FIRST, 0.0  # the interval; the last one that was logged

    def measure(self, stall_s: float, write_s: float, trained_s: float) -> None:
        """Record the seconds for which a checkpoint stopped training, and until it was on disk; 0: unknown."""
        for name, value in (("stall_s", stall_s), ("write_s", write_s)):
            past = getattr(self, name)
            if value:
                setattr(self, name, SMOOTHING * past + (1 - SMOOTHING) * value if past else value)
        self.decide(trained_s)

    def mtbf_s(self, trained_s: float) -> float:
        return max(trained_s, 1.0) / self.failures if self.failures else prior_s(self.devices)

    def decide(self, trained_s: float) -> None:
        """Update the interval: at least a minute, and at least until the previous checkpoint is written."""
        if not self.stall_s:
            return
        self.failures = max(self.failures, noted(self.logs))
        mtbf_s = self.mtbf_s(trained_s)
        self.seconds = max(daly(self.stall_s, mtbf_s), self.write_s, self.stall_s, LEAST)
        if self.auto and not self.said / CHANGED < self.seconds < self.said * CHANGED:
            self.said = self.seconds
            seen = f"{self.failures} failure(s) in {trained_s / 3600:.3g} h" if self.failures else "none seen, a prior"
            share = lost(self.seconds, self.stall_s, self.restart_s + self.write_s, mtbf_s)
            known = {"is written in": self.write_s, "a start takes": self.restart_s}
            times = "".join(f", {name} {value:.3g} s" for name, value in known.items() if value)
            log.info(
                "checkpoint.every=auto: every %.4g s; a checkpoint stops training for %.3g s%s; a failure comes every "
                "%.3g h (%s); checkpoints and failures take %.2g %%",
                self.seconds, self.stall_s, times, mtbf_s / 3600, seen, 100 * share,
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in MEASURED} if self.auto else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in MEASURED:
            value = state[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name}={value}")
            setattr(self, name, value)


def noted(logs: Path) -> int:
    """Count the machine failures that the supervisor has recorded, and torchrun's restarts.

    Users' mistakes don't count.
    """
    try:
        count = sum(map(_is_of_machines, (logs / "events.jsonl").read_bytes().splitlines()))
    except OSError:
        count = 0
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return count + (int(restarts) if restarts.isdecimal() else 0)


def _is_of_machines(line: bytes) -> bool:
    try:
        event = json.loads(line)
    except ValueError:  # a full disk may truncate a line
        return False
    return isinstance(event, dict) and event.get("of_machines") is True
