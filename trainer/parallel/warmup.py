"""Discarded passes before the first step: they leave no trace in buffers, and their time is measured."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trainer.comm.ranks import Ranks


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restore the module's buffers at the end: discarded passes change running statistics."""
    before = [buffer.clone() for buffer in module.buffers()]
    yield
    for buffer, value in zip(module.buffers(), before, strict=True):
        buffer.copy_(value)


def time_pass(run_pass: Callable[[], None], ranks: Ranks) -> float:
    """Return the seconds that a pass takes once all ranks are ready. A collective."""
    wait(ranks.device)
    ranks.gather(None)
    began = time.monotonic()
    run_pass()
    wait(ranks.device)
    return time.monotonic() - began


def wait(device: torch.device) -> None:
    """Wait until the device has done all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
