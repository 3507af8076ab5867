"""Discarded passes before the first step: they leave no trace in buffers, and are timed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.comm.ranks import Ranks


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restore the module's buffers at the end, because discarded passes change running statistics."""
    before = [buffer.clone() for buffer in module.buffers()]
    yield
    for buffer, value in zip(module.buffers(), before, strict=True):
        buffer.copy_(value)


def integer_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Copy the buffers that are not floating-point, which passes often leave unchanged."""
    return {name: buffer.clone() for name, buffer in module.named_buffers() if not buffer.is_floating_point()}


def constants(module: nn.Module, before: dict[str, Tensor], device: torch.device) -> frozenset[str]:
    """Return the names of the buffers that still have the value `before` on all ranks. A collective."""
    if not before:
        return frozenset()
    after = dict(module.named_buffers())
    changed = [name not in after or not torch.equal(value, after[name]) for name, value in before.items()]
    dist.all_reduce(anywhere := torch.tensor(changed, dtype=torch.uint8, device=device), dist.ReduceOp.MAX)
    return frozenset(compress(before, anywhere.logical_not().tolist()))


def time_pass(run_pass: Callable[[], None], ranks: Ranks) -> float:
    """Return the seconds that a pass takes once all ranks are ready. A collective."""
    wait(ranks.device)
    ranks.gather(None)
    began = time.monotonic()
    run_pass()
    wait(ranks.device)
    return time.monotonic() - began


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
