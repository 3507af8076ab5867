"""Finds what a rank has of its host: cores and memory, which ranks of the same host share."""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

from trainer.comm.ranks import Ranks
from trainer.process import cgroup

BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a host


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
