"""Finds the largest micro-batch that fits a device's memory."""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.errors import is_out_of_memory
from trainer.parallel.strategy import Strategy

PROBE = 256  # rows and columns of a matrix whose optimizer state is measured
EMPTIED = Counter[torch.device]()  # how often `drop_gradients` has released each device's unused memory


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
    """Return whether the call runs out of memory. The error's frames, which hold tensors, are freed."""
    try:
        run()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return True
    return False


def state_share(
    new_optimizer: Callable[[nn.Module], Optimizer],
    device: torch.device,
    choose: Callable[[Iterable[float]], float] = max,
) -> float:
    """Return the bytes of optimizer state per byte of a float32 parameter, measured on small matrices.

    Optimizers may treat hidden matrices and embeddings differently: `choose` is `max` or `min` of the two.
    """
    probe, zeros = nn.Module(), torch.zeros(PROBE, PROBE, device=device)
    probe.weight = nn.Parameter(zeros.clone())  # a layer would draw numbers for its weights
    probe.embedding = nn.Embedding(PROBE, PROBE, _weight=zeros.clone())
    for p in probe.parameters():
        p.grad = torch.zeros_like(p)
    optimizer = new_optimizer(probe)
    optimizer.step()
    states = [optimizer.state[p].values() for p in probe.parameters()]
    return choose(sum(v.nbytes for v in state if isinstance(v, Tensor)) for state in states) / zeros.nbytes


def bytes_of_step(strategy: Strategy, share: float) -> int:
    """Return the bytes that a step allocates after the first pass: gradients and optimizer state, by `state_share`."""
    stepped = strategy.parameters if strategy.owned is None else strategy.owned
    state = sum(share * p.numel() * max(4, p.element_size()) for p in stepped)  # float32 for bf16 weights too
    return sum(p.nbytes for p in strategy.parameters) + int(state)


def fits_alongside(held: int, run: Callable[[], Any], device: torch.device) -> bool:
    """Return whether `run` fits into memory while `held` further bytes are allocated."""

    def run_alongside() -> None:
        memory = torch.empty(held, dtype=torch.uint8, device=device)
        run()
        del memory

    return not fails(run_alongside)


def drop_gradients(parameters: Sequence[Tensor], device: torch.device) -> None:
    """Drop the gradients, and release the memory of failed passes."""
    for p in parameters:
        p.grad = None
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        EMPTIED[device] += 1
