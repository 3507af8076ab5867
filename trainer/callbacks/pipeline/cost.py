"""The stages of a pipeline: which parts of the model each rank has."""

import functools
from collections.abc import Sequence

from trainer.callbacks.pipeline.balance import TWICE, balance


@functools.lru_cache(maxsize=64)  # a search asks for the same few thousands of times
def parts_of_ranks(
    parts: tuple[float, ...], ranks: int, schedule: str, cut: tuple[int, ...] | None
) -> Sequence[Sequence[int]]:
    """Return the parts of each rank, cut as `pipeline` does; nothing if there are fewer blocks than stages.

    Stage s is of rank s modulo `ranks`. ZBV gives the second ones in reverse order.

    Args:
        parts: Share of the passes before the blocks, of each block, and after them.
        cut: The first block of each stage but the first; None: the slowest stage takes the least time.
    """
    stages, blocks = ranks * (2 if schedule in TWICE else 1), parts[1:-1]
    if len(blocks) < stages:
        return ()
    starts = (0, *cut) if cut else balance(blocks, [1.0] * stages, parts[0], parts[-1], lambda *_: True)
    assert starts is not None
    found: list[list[int]] = [[] for _ in range(ranks)]
    for stage, (start, stop) in enumerate(zip(starts, (*starts[1:], len(blocks)), strict=True)):
        rank = stages - 1 - stage if schedule == "zbv" and stage >= ranks else stage % ranks
        found[rank] += range(start + (stage > 0), stop + 1 + (stage == stages - 1))
    return found
