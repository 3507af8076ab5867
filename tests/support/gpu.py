"""The device of tests/gpu: a GPU. With ECHELON_TEST_DEVICE=cpu it is the CPU, which tries the tests themselves out."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

DEVICE = torch.device("cpu") if os.environ.get("ECHELON_TEST_DEVICE") == "cpu" else torch.device("cuda", 0)
ACCELERATOR = DEVICE.type
ON_GPU = ACCELERATOR == "cuda"

on_device = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="no CUDA device"),
]
only_gpu = pytest.mark.skipif(not ON_GPU, reason="a CPU has no such thing")
needs_two = pytest.mark.skipif(not ON_GPU or torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


@contextmanager
def no_waits() -> Iterator[None]:
    """What waits for the GPU raises."""
    if not ON_GPU:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def delay(cycles: int = 2**30) -> None:
    """Keeps the current stream busy, for half a second or so."""
    if ON_GPU:
        torch.cuda._sleep(cycles)


def allocated() -> int:
    return torch.cuda.memory_allocated(DEVICE) if ON_GPU else 0
