"""Binds the ranks of a node to CPU cores beside their GPUs."""

import os
import socket
from pathlib import Path

import torch

from trainer.comm.ranks import Ranks
from trainer.log import log
from trainer.process.affinity import SYS, Neighbour, bind_process, divide, numa_node_of, numa_nodes


def pci_address(device: torch.device) -> str:
    """Return the address of a GPU in /sys/bus/pci/devices."""
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def bind_to_cores(ranks: Ranks, mode: str, sys: Path = SYS) -> None:
    """Bind this process before data workers fork, if `mode` is auto. A collective.

    torch's threads within an operation become as few as the cores, whatever OMP_NUM_THREADS says.
    """
    if mode == "none" or (ranks.world == 1 and ranks.device.type == "cpu"):
        return
    near = numa_node_of(sys, pci_address(ranks.device)) if ranks.device.type == "cuda" else None
    rows = ranks.gather([socket.gethostname(), sorted(os.sched_getaffinity(0)), near])
    own = [rank for rank, row in enumerate(rows) if row[0] == rows[ranks.rank][0]]
    binding = divide(own.index(ranks.rank), [Neighbour(*rows[rank][1:]) for rank in own], numa_nodes(sys), sys)
    log.info("affinity: %s", binding.reason)
    if binding.cores is None:
        return
    bind_process(binding.cores)
    torch.set_num_threads(min(torch.get_num_threads(), len(binding.cores)))
