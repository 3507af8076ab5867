"""Chooses this process's device and backend."""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import ConfigError
from trainer.process.environment import Place


def count_gpus(accelerator: str) -> int:
    """Count the CUDA devices available to a run on this node, without creating a context."""
    count = torch.cuda.device_count() if accelerator != "cpu" and torch.cuda.is_available() else 0
    if accelerator == "cuda" and not count:
        raise ConfigError(
            "trainer.accelerator=cuda: torch sees no CUDA device; use trainer.accelerator=cpu, or a CUDA build of torch"
        )
    return count


def pick_device(accelerator: str, place: Place) -> torch.device:
    count = count_gpus(accelerator)
    if not count:
        return torch.device("cpu")
    # With srun --gpus-per-task=1 each task sees only its own device.
    local_rank = 0 if place.launcher == "srun" and count == 1 else place.local_rank
    if local_rank >= count:
        raise ConfigError(
            f"trainer.devices: this node has {count} CUDA device(s), and local rank {local_rank} has none; "
            f"use trainer.devices={count} or trainer.accelerator=cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def pick_backend(backend: str, device: torch.device) -> str:
    if backend == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError(f"trainer.backend=nccl: needs CUDA, and this run is on {device}; use trainer.backend=gloo")
    if backend == "mpi" and not dist.is_mpi_available():
        raise ConfigError("trainer.backend=mpi: this torch was built without MPI; use trainer.backend=gloo or nccl")
    return backend


def has_failed(device: torch.device) -> bool:
    """Return whether an error, such as a failed assertion in a kernel, has made the device unusable."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.current_stream(device).query()  # does not block
    except RuntimeError:
        return True
    return False


def pin(memory: Tensor) -> None:
    """Pin `memory` for asynchronous copies. Torch's own pinned memory would round its size up to a power of two."""
    cuda: Any = torch.cuda.cudart()
    start = memory.data_ptr()
    torch.cuda.check_error(cuda.cudaHostRegister(start, memory.numel(), 0))
    weakref.finalize(memory.untyped_storage(), cuda.cudaHostUnregister, start).atexit = False
