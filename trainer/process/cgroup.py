"""Reads the limits and the use of this process's control groups (version 1 or 2), and the machine's memory."""

import contextlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PROC, SYS = Path("/proc"), Path("/sys")
UNLIMITED = 1 << 62  # version 1 writes the largest multiple of a page instead of "max"


class Limit(NamedTuple):
    value: float
    group: Path  # the folder whose processes share it


def groups(controller: str, proc: Path = PROC, sys: Path = SYS) -> list[Path]:
    """Return the folders of this process's control groups, innermost first; empty without that controller.

    A container may see its own group as the root, so that the group's path does not exist there.
    """
    root = sys / "fs" / "cgroup"
    second = (root / "cgroup.controllers").exists()
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if (not names and second) or controller in names.split(","):
                base = root if second else root / controller
                inner = base / path.lstrip("/")
                return [folder for folder in (inner, *inner.parents) if folder.is_relative_to(base) and folder.is_dir()]
    return []


def tightest(controller: str, read: Callable[[Path], float | None], proc: Path, sys: Path) -> Limit | None:
    """Return the smallest limit of the group and its ancestors, all of which apply; None if there is none."""
    limits = list[Limit]()
    for group in groups(controller, proc, sys):
        with contextlib.suppress(OSError, ValueError):
            if (value := read(group)) is not None:
                limits.append(Limit(value, group))
    return min(limits, default=None)


def memory(proc: Path = PROC, sys: Path = SYS) -> Limit | None:
    """Return the limit of memory, in bytes."""
    return tightest("memory", lambda group: number(group, "memory.max", "memory.limit_in_bytes"), proc, sys)


def cores(proc: Path = PROC, sys: Path = SYS) -> Limit | None:
    """Return the limit of CPU time, in seconds per second."""
    return tightest("cpu", quota, proc, sys)


def cores_each(ranks: int, proc: Path = PROC, sys: Path = SYS) -> float:
    """Return each rank's share of the CPU limit, in cores; infinity without a limit."""
    limit = cores(proc, sys)
    return limit.value / ranks if limit else math.inf


def processes(proc: Path = PROC, sys: Path = SYS) -> Limit | None:
    """Return the limit of processes and threads."""
    return tightest("pids", lambda group: number(group, "pids.max"), proc, sys)


def number(group: Path, *names: str) -> float | None:
    """Return the limit in the first of these files that exists; None if it is unlimited."""
    file = next(path for path in map(group.joinpath, names) if path.exists() or path.name == names[-1])
    text = file.read_text().strip()
    return None if text == "max" or int(text) >= UNLIMITED else int(text)


def quota(group: Path) -> float | None:
    if (group / "cpu.max").exists():
        given, period = (group / "cpu.max").read_text().split()
        return None if given == "max" else int(given) / int(period)
    given = int((group / "cpu.cfs_quota_us").read_text())
    return None if given < 0 else given / int((group / "cpu.cfs_period_us").read_text())


def memory_used(group: Path) -> int:
    """Return the bytes that a group uses, without page cache that the kernel would reclaim first."""
    second = (group / "memory.current").exists()
    used = int((group / ("memory.current" if second else "memory.usage_in_bytes")).read_text())
    lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    stat = {line[0]: int(line[1]) for line in lines if len(line) == 2}
    return max(0, used - stat.get("inactive_file" if second else "total_inactive_file", 0))


class Memory(NamedTuple):
    total: int  # bytes that the processes of this machine, or of this control group, may use together
    free: int  # bytes of `total` that are unused
    swap: int  # free bytes of swap
    limited: bool  # a control group sets the limit, below the machine's memory


def available_memory(proc: Path = PROC, sys: Path = SYS) -> Memory | None:
    """Return the memory that processes on this host may use; None if unknown."""
    with contextlib.suppress(OSError):
        lines = (line.replace(":", " ").split() for line in (proc / "meminfo").read_text().splitlines())
        known = {line[0]: int(line[1]) << 10 for line in lines}
        if {"MemTotal", "MemAvailable"} <= known.keys():
            total, free, swap = known["MemTotal"], known["MemAvailable"], known.get("SwapFree", 0)
            if (limit := memory(proc, sys)) and limit.value < total:
                return Memory(int(limit.value), min(free, int(limit.value) - memory_used(limit.group)), swap, True)
            return Memory(total, free, swap, False)
    return None


def oom_kills(proc: Path = PROC, sys: Path = SYS) -> int:
    """Count the processes that the kernel has killed because the machine or a control group ran out of memory."""
    count = 0
    events = (group / name for group in groups("memory", proc, sys) for name in ("memory.events", "memory.oom_control"))
    for file in (proc / "vmstat", *events):
        with contextlib.suppress(OSError):
            count += sum(map(int, re.findall("^oom_kill ([0-9]+)$", file.read_text(), re.MULTILINE)))
    return count


def cpu_seconds(group: Path, proc: Path = PROC, sys: Path = SYS) -> float:
    if (group / "cpu.max").exists():
        lines = (line.split() for line in (group / "cpu.stat").read_text().splitlines())
        return {key: int(value) for key, value in lines}["usage_usec"] / 1e6
    # In version 1 another controller counts CPU time and may have other folders; then its innermost group counts.
    base = sys / "fs" / "cgroup"
    twin = base / "cpuacct" / group.relative_to(base / "cpu")
    folder = twin if twin.is_dir() else groups("cpuacct", proc, sys)[0]
    return int((folder / "cpuacct.usage").read_text()) / 1e9
