"""Finds a rank's share of its host's cores and memory, and meters the processor seconds of communication."""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import torch

from trainer.comm.ranks import Ranks
from trainer.process import cgroup
from trainer.process.cgroup import PROC
from trainer.timeouts import BASELINE_S

BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a host
QUIET = 0.05  # of the processors: a machine that does more by itself hides what communication costs


def share(ranks: Ranks) -> tuple[float, float | None]:
    """Return the cores and bytes of memory per rank, the minimum over ranks. A collective.

    Ranks of one host with the same affinity share its cores, even in separate containers. Ranks of one control group
    share its limits. The memory is the GPU's or the host's; None if it is unknown.
    """
    own = {
        "host": boot(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "gpu": torch.cuda.mem_get_info(ranks.device)[1] if ranks.device.type == "cuda" else 0,
        "memory": max(0, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        "core_limit": limit(cgroup.cores()),
        "memory_limit": limit(cgroup.memory()),
    }
    places = ranks.gather(own)
    cores, memories = list[float](), list[float]()
    for place in places:
        neighbours = [other for other in places if other["host"] == place["host"]]
        same = sum(other["affinity"] == place["affinity"] for other in neighbours)
        cores.append(min([len(place["affinity"]) / same, *granted("core_limit", place, neighbours)]))
        whole = place["memory"] / len(neighbours)
        memories.append(place["gpu"] or min([whole, *granted("memory_limit", place, neighbours)]))
    return min(cores), min(memories) or None


def limit(found: cgroup.Limit | None) -> tuple[float, int] | None:
    """Return a limit and its control group's inode, which is the same in all containers of the host."""
    return (found.value, found.group.stat().st_ino) if found else None


def granted(key: str, place: dict[str, Any], neighbours: list[dict[str, Any]]) -> list[float]:
    """Return the rank's share of its control group's limit; empty without one. `neighbours` are the host's ranks."""
    if place[key] is None:
        return []
    value, group = place[key]
    return [value / sum(other[key] is not None and other[key][1] == group for other in neighbours)]


def boot() -> str:
    with contextlib.suppress(OSError):
        return BOOT.read_text().strip()
    return os.uname().nodename


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
