"""Finds what a rank has of its host: cores and memory, which ranks of the same host share."""

import contextlib
import os
from pathlib import Path

import torch

from trainer.comm.ranks import Ranks

BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a host
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def share(ranks: Ranks) -> tuple[float, float | None]:
    """Return the cores and the bytes of memory that each rank has for itself, the least of all ranks. A collective.

    Ranks of one host that may use the same cores share these, also if each takes itself for alone, as in containers.
    The memory is the GPU's, or the part of the host's that the system grants; None if it is unknown.
    """
    affinity = sorted(os.sched_getaffinity(0))
    memory = torch.cuda.mem_get_info(ranks.device)[1] if ranks.device.type == "cuda" else 0
    places = ranks.gather([boot(), affinity, memory or host_memory(), bool(memory)])
    cores: list[float] = []
    memories: list[float] = []
    for host, own, size, alone in places:
        beside = [other for other in places if other[0] == host]
        cores.append(len(own) / sum(other[1] == own for other in beside))
        memories.append(size / (1 if alone else len(beside)))
    return min(cores), min(memories) or None


def boot() -> str:
    with contextlib.suppress(OSError):
        return BOOT.read_text().strip()
    return os.uname().nodename


def host_memory() -> int:
    """Return the bytes of memory that this process may take; 0 if they are unknown."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # a control group without a limit says "max"
            found.append(int(Path(name).read_text()))
    return max(0, min(found))
