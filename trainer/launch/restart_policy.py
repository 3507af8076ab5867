"""Decides whether a run is restarted after a rank has failed. Imports no torch."""

import re
import signal
from collections import Counter

from trainer.errors import FINAL, GAVE_UP, UNAVAILABLE
from trainer.launch.failure import Failure
from trainer.process.heartbeat import Beat
from trainer.timeouts import AWAY_S, LONGEST_PAUSE_S

SAME = 3  # number of equal failures after which the run is not restarted


class RestartPolicy:
    """Allows `limit` consecutive restarts that don't get beyond the furthest step yet."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.furthest = limit, 0, -1
        self.alike: Counter[tuple[int, int, str]] = Counter()
        self.pause_s = 0.0  # before the next attempt

    def is_final(self, failure: Failure, beat: Beat | None) -> bool:
        """Return whether a restart would fail in the same way, because the user's code failed and not a machine."""
        first = self.furthest < 0 and (beat is None or beat.step == beat.began)
        own = failure.reported and failure.code != UNAVAILABLE
        return failure.code in FINAL or (first and (own or failure.out_of_memory))

    def decide(self, failure: Failure, beat: Beat | None) -> tuple[int, str]:
        """Return the run's exit code, 0 for a restart, and a message for the user.

        `beat` is the failed rank's last heartbeat; None if it did not start a step.
        """
        step, away = beat.step if beat else 0, failure.code == UNAVAILABLE
        if self.is_final(failure, beat) or not self.limit:
            return failure.code, ""
        if beat and step > self.furthest:
            self.furthest, self.used = step, 0
        # Ignore words with digits (ranks, ports, addresses), because any rank may be the first to meet a bad batch.
        lines = [line for line in failure.text.splitlines() if line[:1].strip()]  # without frames
        kind = (step, failure.code, re.sub(r"\w*\d\w*", "", lines[-1] if lines else ""))
        self.alike[kind] += beat is not None
        if self.alike[kind] == SAME:
            short = "; the kernel kills where memory is short: try a smaller micro_batch"
            killed = failure.code == 128 + signal.SIGKILL
            text = f"echelon: the same failure {SAME} times after step {step}: given up"
            return GAVE_UP, text + (short if killed else "")
        if self.used == self.limit:
            further = f"no further than step {max(0, self.furthest)}"
            return failure.code, f"echelon: {self.limit} restarts came {further}: given up"
        self.used += 1
        self.pause_s = max(AWAY_S * away, min(LONGEST_PAUSE_S, 2.0 ** (self.used - 1) - 1))
        where = f"after step {step}" if beat else "before its first step"
        return 0, f"echelon: failed {where}; restart {self.used} of {self.limit}"
