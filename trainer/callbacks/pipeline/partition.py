"""Chooses the cut of a pipeline: the slowest stage is as fast as possible, and each fits its ranks' memory."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple

import torch

from trainer.callbacks.pipeline.balance import Fits, balance, best_cut
from trainer.callbacks.pipeline.profile_blocks import Trial

ALIKE = 1.1  # ranks whose times differ by less count as equally fast
USABLE = 0.9  # fraction of a GPU's free memory; the rest is for fragmentation and for kernels


class Sizes(NamedTuple):
    """Bytes of a model's parts: before the blocks, each block, after the blocks."""

    fixed: list[float]  # parameters, gradients, optimizer state
    saved: list[float]  # activations kept for a micro-batch's backward pass
    stream: int = 0  # sent between two stages, per micro-batch


class StageMemory:
    """The bytes that stages need, and the bytes available to them.

    Args:
        limits: Bytes available per stage: the minimum over the ranks that run it.
        in_flight: Per stage, the most micro-batches between their forward and their backward pass.
        micros: Micro-batches per step; torch allocates a message for each.
        half: Whether a limit is half of a rank's, because two stages share the rank.
    """

    def __init__(
        self, sizes: Sizes, limits: Sequence[float], in_flight: Sequence[int], micros: int, half: bool = False
    ) -> None:
        self.sizes, self.limits, self.in_flight, self.micros, self.half = sizes, limits, in_flight, micros, half
        self.blocks, self.stages = len(sizes.fixed) - 2, len(limits)
        self.fixed, self.saved = [0.0, *accumulate(sizes.fixed)], [0.0, *accumulate(sizes.saved)]

    def need(self, stage: int, start: int, stop: int) -> tuple[float, float, float]:
        """Return the bytes of a stage with the blocks `start` to `stop`: fixed, saved, and for messages."""
        low = start + 1 if stage else 0
        high = stop + 1 + (stage == self.stages - 1)
        ends = (stage > 0) + (stage < self.stages - 1)
        saved = self.in_flight[stage] * (self.saved[high] - self.saved[low])
        return self.fixed[high] - self.fixed[low], saved, ends * self.micros * self.sizes.stream

    def fits(self, stage: int, start: int, stop: int) -> bool:
        return sum(self.need(stage, start, stop)) <= self.limits[stage]

    def halved(self) -> "StageMemory":
        return StageMemory(self.sizes, [limit / 2 for limit in self.limits], self.in_flight, self.micros, half=True)

    def holds(self, starts: Sequence[int], ranks: Sequence[int]) -> bool:
        """Return whether all stages fit on their ranks; `ranks` has the rank of each stage."""
        needs = dict.fromkeys(ranks, 0.0)
        ends = (*starts[1:], self.blocks)
        for stage, rank in enumerate(ranks):
            needs[rank] += sum(self.need(stage, starts[stage], ends[stage]))
        return all(needs[rank] <= limit for rank, limit in zip(ranks, self.limits, strict=True))

    def tightest(self) -> tuple[int, tuple[float, float, float]]:
        """Return the fullest stage, and its bytes, in the cut whose fullest stage needs the least."""

        def share(stage: int, start: int, stop: int) -> float:
            return sum(self.need(stage, start, stop)) / max(self.limits[stage], 1.0)

        starts = best_cut(self.blocks, self.stages, share)
        assert starts is not None
        places = list(zip(range(self.stages), starts, (*starts[1:], self.blocks), strict=True))
        fullest = max(places, key=lambda place: share(*place))
        return fullest[0], self.need(*fullest)


def max_in_flight(schedule: str, stages: int, ranks: int, micros: int, run_ahead: int) -> list[int]:
    """Return, per stage, an upper bound on the micro-batches between their forward and their backward pass."""
    if schedule == "pipedream_2bw":
        return [run_ahead * (stages - 1 - stage) + 1 for stage in range(stages)]
    by_stage: dict[str, Callable[[int], int]] = {
        "gpipe": lambda stage: micros,
        "interleaved": lambda stage: min(stages, 2 * (stages - stage) - 1),
        "zero_bubble": lambda stage: stages if stage < ranks else ranks,  # weight gradients are computed later
    }
    most = by_stage.get(schedule, lambda stage: stages - stage)
    return [min(micros, most(stage)) for stage in range(stages)]


def cut_by_time(trials: Sequence[Trial], place: Sequence[Sequence[int]], fits: Fits) -> tuple[int, ...] | None:
    """Return the first block of each stage so that the slowest stage is as fast as possible; None if no cut fits.

    There is one trial per rank. `place` has the ranks that run each stage; the slowest of them determines its speed.
    """
    totals = [trial.total for trial in trials]
    slow = [max(totals[rank] for rank in ranks) / min(totals) for ranks in place]
    slow = [1.0 if factor < ALIKE else factor for factor in slow]

    def share(*seconds: float) -> float:
        return fmean(one / total for one, total in zip(seconds, totals, strict=True))

    each = [share(*column) for column in zip(*(trial.blocks for trial in trials), strict=True)]
    head, tail = share(*(trial.head for trial in trials)), share(*(trial.tail for trial in trials))
    return balance(each, slow, head, tail, fits)


def memory_limit(device: torch.device) -> float | None:
    """Return the GPU memory available to this process, in bytes; None on a CPU, whose limit is unknown."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return USABLE * min(free + torch.cuda.memory_reserved(device), share * total)
