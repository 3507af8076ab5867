"""Finds the largest micro-batch that fits into the memory of a device."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.errors import is_out_of_memory

HELD = 3  # copies of the parameters that a step has and the first pass has not: gradients, two moments


def search(first: int, most: int, fits: Callable[[int], bool]) -> list[int]:
    """Return the sizes that fit, in rising order: `first` is doubled, or halved, then bisected."""
    fitting, failing, size = list[int](), most + 1, first
    while size > (fitting[-1] if fitting else 0):
        if fits(size):
            fitting.append(size)
        else:
            failing = size
        low = fitting[-1] if fitting else 0
        size = min(2 * low, most) if failing > most and low else (low + failing) // 2
    return fitting


def fails(run: Callable[[], Any]) -> bool:
    """Return whether memory ran out. The frames of the error, which hold tensors, are gone then."""
    try:
        run()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return True
    return False


def fits_beside_state(run: Callable[[], Any], parameters: Sequence[Tensor]) -> bool:
    """Return whether `run` fits while memory is held for gradients and for two moments of each parameter."""

    def run_beside_state() -> None:
        held = [torch.empty(HELD * p.numel(), dtype=p.dtype, device=p.device) for p in parameters]
        run()
        del held

    return not fails(run_beside_state)


def drop_gradients(parameters: Sequence[Tensor], device: torch.device) -> None:
    """Forget the gradients, and give the memory of failed passes back."""
    for p in parameters:
        p.grad = None
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
