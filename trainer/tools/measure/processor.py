"""Estimates the processor seconds of communication by what the whole machine does, interrupts included."""

import os
import time
from pathlib import Path

from trainer.comm.ranks import Ranks
from trainer.process.cgroup import PROC
from trainer.timeouts import BASELINE_S
from trainer.tools.measure.host import boot

QUIET = 0.05  # of the processors: a machine that does more by itself hides what communication costs


class Meter:
    """Meters the whole machine, because the kernel charges interrupts to whichever process computes.

    The estimate is the machine's load while ranks communicate, minus its load before, split equally among its ranks.
    This needs an otherwise idle machine. Creating a meter is a collective.

    Attributes:
        load: The share of processors busy beforehand, on the busiest machine; 1 if unknown.
    """

    def __init__(self, ranks: Ranks, proc: Path = PROC) -> None:
        self.proc = proc
        own = boot()
        self.ranks = ranks.gather(own).count(own)
        began, before = time.monotonic(), self._busy()
        time.sleep(BASELINE_S)
        after, seconds = self._busy(), time.monotonic() - began
        self.base, load = 0.0, 1.0
        if before is not None and after is not None:
            self.base = (after - before) / seconds  # processors
            load = self.base / self._processors()
        self.load = max(ranks.gather(load))
        self.quiet = self.load <= QUIET

    def begin(self) -> tuple[float, float] | None:
        """Return the time and the machine's busy seconds; None if it is not quiet."""
        busy = self._busy() if self.quiet else None
        return None if busy is None else (time.monotonic(), busy)

    def end(self, began: tuple[float, float] | None) -> float | None:
        """Return a rank's share of the processor seconds since `began`; None if unknown."""
        busy = self._busy()
        if began is None or busy is None:
            return None
        return max(0.0, busy - began[1] - self.base * (time.monotonic() - began[0])) / self.ranks

    def _busy(self) -> float | None:
        """Return the busy seconds of all processors since an arbitrary moment; None if /proc lacks them.

        Idle time is exact to 10 ms, while busy time is counted in ticks. Time stolen by a hypervisor counts as idle.
        """
        try:
            line = (self.proc / "stat").read_text().split("\n", 1)[0].split()
            idle, iowait, steal = (int(line[field]) for field in (4, 5, 8))
        except (OSError, ValueError, IndexError):
            return None
        return time.monotonic() * self._processors() - (idle + iowait + steal) / os.sysconf("SC_CLK_TCK")

    def _processors(self) -> int:
        lines = (self.proc / "stat").read_text().splitlines()
        return sum(line.startswith("cpu") for line in lines) - 1
