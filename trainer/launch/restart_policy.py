"""Whether a run whose rank failed is started again. Imports no torch."""

import re
import signal
from collections import Counter

from trainer.errors import FINAL, GAVE_UP, UNAVAILABLE
from trainer.launch.failure import Failure
from trainer.process.heartbeat import Beat
from trainer.timeouts import AWAY_S, LONGEST_PAUSE_S

SAME = 3  # equal failures, after which the run is given up


class RestartPolicy:
    """Allows `limit` attempts in a row of which none comes a step further than those before."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.furthest = limit, 0, -1
        self.alike: Counter[tuple[int, int, str]] = Counter()
        self.pause_s = 0.0  # before the next attempt

    def decide(self, failure: Failure, beat: Beat | None) -> tuple[int, str]:
        """Return the run's exit code, 0 to start again, and a line for the user.

        `beat` is the failed rank's last one; None if the rank came to no step.
        """
        began, step = beat[:2] if beat else (0, 0)
        away = failure.code == UNAVAILABLE
        mistake = failure.reported and step == began and self.furthest < 0 and not away  # there from the beginning
        if failure.code in FINAL or mistake or not self.limit:
            return failure.code, ""
        if beat and step > self.furthest:
            self.furthest, self.used = step, 0
        # Without words that have digits (ranks, ports, addresses): any rank may be the first to meet a bad batch.
        kind = (step, failure.code, re.sub(r"\w*\d\w*", "", failure.text.rstrip().rpartition("\n")[2]))
        self.alike[kind] += beat is not None
        if self.alike[kind] == SAME:
            short = "; the kernel kills where memory is short: try a smaller micro_batch"
            killed = failure.code == 128 + signal.SIGKILL
            return GAVE_UP, f"echelon: the same {SAME} times after step {step}: given up{short if killed else ''}"
        if self.used == self.limit:
            further = f"no further than step {max(0, self.furthest)}"
            return failure.code, f"echelon: {self.limit} restarts came {further}: given up"
        self.used += 1
        self.pause_s = max(AWAY_S * away, min(LONGEST_PAUSE_S, 2.0 ** (self.used - 1) - 1))
        where = f"after step {step}" if beat else "before its first step"
        return 0, f"echelon: failed {where}; restart {self.used} of {self.limit}"
