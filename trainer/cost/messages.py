"""A collective as a size in bytes, and the bytes that each rank sends for it."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Shapes = Sequence[tuple[int, ...]]  # of a bucket's parameters


class Message(NamedTuple):
    """A collective. `size` is in bytes as nccl-tests counts them: the tensor for `all_reduce`, else all ranks' parts
    together.
    """

    collective: str
    size: float

    def sent(self, ranks: int) -> float:
        """Return the bytes that each rank sends: a lower bound, which rings attain (Chan et al. 2007)."""
        passes = 2 if self.collective == "all_reduce" else 1
        return passes * (ranks - 1) / ranks * self.size


def sent(messages: Iterable[Message], ranks: int) -> float:
    return sum(message.sent(ranks) for message in messages)


def elements(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))


def plain(shapes: Shapes) -> list[Message]:
    """Return the float32 all-reduce of a bucket."""
    return [Message("all_reduce", 4 * elements(shapes))]
