"""Runs a model in one piece before it is cut: the time of each block, and the loss that the stages must give."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.log import log
from trainer.parallel.stages import balance
from trainer.parallel.warmup import buffers_kept, wait

PASSES = 3  # of which the fastest counts, after one that warms up
ALIKE = 1.1  # ranks whose times differ by less count as equally fast


class Trial(NamedTuple):
    """Seconds of a forward pass on one rank, and the loss."""

    head: float  # before the first block
    blocks: list[float]
    tail: float  # after the last block
    loss: float

    @property
    def total(self) -> float:
        return self.head + sum(self.blocks) + self.tail


def try_whole(
    model: nn.Module, blocks: Sequence[nn.Module], loss: Callable[[], Tensor], device: torch.device
) -> Trial | None:
    """Run the whole model without dropout on the device; return it to the host. None if it does not run like this.

    Args:
        loss: Computes the loss of a micro-batch.
    """
    marks: list[float] = []

    def mark(*_: object) -> None:
        wait(device)
        marks.append(time.perf_counter())

    handles = [block.register_forward_pre_hook(mark) for block in blocks]
    handles.append(blocks[-1].register_forward_hook(mark))
    trials: list[Trial] = []
    try:
        model.to(device)
        with torch.no_grad(), torch.random.fork_rng(), buffers_kept(model), evaluating(model):
            for _ in range(1 + PASSES):
                marks.clear()
                mark()
                value = loss().item()
                mark()
                seconds = [end - begin for begin, end in pairwise(marks)]
                if len(seconds) != len(blocks) + 2:
                    return None
                trials.append(Trial(seconds[0], seconds[1:-1], seconds[-1], value))
    except Exception as error:  # too little memory for the whole, or a loss that needs the training mode
        log.info("pipeline: the model does not run in one piece (%s)", " ".join(str(error).split())[:200])
        return None
    finally:
        for handle in handles:
            handle.remove()
        model.to("cpu")
    return min(trials[1:], key=lambda trial: trial.total)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set the model to eval, and each module back at the end: a recipe may keep some in eval."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def cut_by_time(trials: Sequence[Trial], place: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the first block of each stage, so that the slowest stage takes the least time.

    Args:
        trials: Of each rank.
        place: The ranks that run each stage: they wait for the slowest.
    """
    totals = [trial.total for trial in trials]
    slow = [max(totals[rank] for rank in ranks) / min(totals) for ranks in place]
    slow = [1.0 if factor < ALIKE else factor for factor in slow]

    def share(*seconds: float) -> float:
        return fmean(one / total for one, total in zip(seconds, totals, strict=True))

    each = [share(*column) for column in zip(*(trial.blocks for trial in trials), strict=True)]
    head, tail = share(*(trial.head for trial in trials)), share(*(trial.tail for trial in trials))
    return balance(each, slow, head, tail)
