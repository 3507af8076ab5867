"""Binds the ranks of a node to CPU cores close to their GPUs."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.comm.ranks import Ranks
from trainer.log import log
from trainer.process.affinity import Neighbour, bind_process, divide, numa_node_of, numa_nodes
from trainer.process.cgroup import SYS


def pci_address(device: torch.device) -> str:
    """Return the GPU's address in /sys/bus/pci/devices."""
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def bind_to_cores(ranks: Ranks, mode: str, sys: Path = SYS) -> None:
    """Bind this process, before data workers fork, if `mode` is auto. A collective.

    Limit torch's intra-op threads to the number of cores, whatever OMP_NUM_THREADS says.
    """
    if mode == "none" or (ranks.world == 1 and ranks.device.type == "cpu"):
        return
    near = numa_node_of(sys, pci_address(ranks.device)) if ranks.device.type == "cuda" else None
    place = ranks.place
    rows = ranks.gather(
        [socket.gethostname(), place.local_rank, place.local_world, sorted(os.sched_getaffinity(0)), near]
    )
    if not (own := ranks_of_node(rows, ranks.rank)):
        log.info("affinity: the ranks of a node are unknown, so nothing is bound")
        return
    neighbours = [Neighbour(*rows[rank][3:]) for rank in own]
    binding = divide(own.index(ranks.rank), neighbours, numa_nodes(sys), sys)
    if binding.cores is None:
        if ranks.device.type == "cuda":  # on a CPU nothing is lost
            log.info("affinity: %s", binding.reason)
        return
    log.info("affinity: %s", binding.reason)
    bind_process(binding.cores)
    torch.set_num_threads(min(torch.get_num_threads(), len(binding.cores)))


def ranks_of_node(rows: Sequence[Sequence[Any]], rank: int) -> list[int]:
    """Return the ranks of this rank's node; empty if they are unknown.

    Each row starts with a rank's host name, local rank and local world size. Containers may share a host name. In that
    case, a node's ranks are consecutive, as the launcher numbers them.
    """
    named = [other for other, row in enumerate(rows) if row[0] == rows[rank][0]]
    if len(named) == rows[rank][2]:
        return named
    found, first = list[int](), 0
    while first < len(rows):
        count = rows[first][2]
        if count < 1 or [list(row[1:3]) for row in rows[first : first + count]] != [[i, count] for i in range(count)]:
            return []
        if first <= rank < first + count:
            found = list(range(first, first + count))
        first += count
    return found
