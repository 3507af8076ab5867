"""The collectives that reduce a bucket, and their bytes: of plain gradients and of each codec.

The docstrings of `trainer/comm/codecs` derive the bytes; `scripts/bench/comm` compares them with a link's counter.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Shapes = Sequence[tuple[int, ...]]  # of a bucket's parameters
GATHERED = ("topk", "dgc", "sign")  # codecs with which a rank decodes the payload of every rank
SCALE_BYTES, INDEX_BYTES = 4, 2
COUNTED = 16384  # elements for each byte of counters of a sparse payload
INT8_BLOCK, SPARSE_BLOCK = 256, 256  # elements


class Message(NamedTuple):
    """A collective. `size` is in bytes, as nccl-tests counts them.

    For `all_reduce` that is the tensor; for `all_gather`, `reduce_scatter` and `all_to_all` all ranks' parts together.
    """

    collective: str
    size: float

    def sent(self, ranks: int) -> float:
        """Return the bytes that each rank sends: a lower bound, which rings reach (Chan et al. 2007)."""
        passes = 2 if self.collective == "all_reduce" else 1
        return passes * (ranks - 1) / ranks * self.size


def sent(messages: Iterable[Message], ranks: int) -> float:
    """Return the bytes that each rank sends."""
    return sum(message.sent(ranks) for message in messages)


def elements(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))


def plain(shapes: Shapes, itemsize: int = 4) -> list[Message]:
    return [Message("all_reduce", itemsize * elements(shapes))]


def fp16(shapes: Shapes) -> list[Message]:
    return [Message("all_reduce", SCALE_BYTES), *plain(shapes, 2)]


def int8(shapes: Shapes, block: int = INT8_BLOCK) -> list[Message]:
    size = elements(shapes) * (1 + SCALE_BYTES / block)
    return [Message("all_to_all", size), Message("all_gather", size)]


def sparse(shapes: Shapes, ranks: int, density: float, itemsize: int) -> list[Message]:
    n = elements(shapes)
    return [Message("all_gather", ranks * ((itemsize + INDEX_BYTES) * density * n + n / COUNTED))]


def signs(shapes: Shapes) -> float:
    """Return the bytes of a bit an element and a scale a parameter."""
    return elements(shapes) / 8 + SCALE_BYTES * len(shapes)


def sign(shapes: Shapes, ranks: int) -> list[Message]:
    return [Message("all_gather", ranks * signs(shapes))]


def onebit_adam(shapes: Shapes) -> list[Message]:
    """Return the messages after the warm-up: the signs of shards, then those of their means."""
    return [Message("all_to_all", signs(shapes)), Message("all_gather", signs(shapes))]


def blocksparse(shapes: Shapes, ranks: int, block: int = SPARSE_BLOCK) -> list[Message]:
    """Return the messages if hardly any block is zero, as in a model whose embedding is its output layer."""
    return [Message("all_gather", ranks * elements(shapes) / block / 8), *plain(shapes)]


def powersgd(shapes: Shapes, rank: int = 4, least: float = 1.0) -> list[Message]:
    """Return the messages of PowerSGD, which compresses a matrix if that makes it `least` times smaller or more."""
    first = second = 0
    for m, n in ((shape[0], math.prod(shape[1:])) for shape in shapes):
        thin = n > 1 and rank * (m + n) * least < m * n
        first, second = first + (rank * m if thin else m * n), second + (rank * n if thin else 0)
    return [Message("all_reduce", 4 * first), Message("all_reduce", 4 * second)]


def of_codec(codec: str, shapes: Shapes, ranks: int, knobs: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a bucket. A knob that is missing or None is left to the codec.

    Args:
        codec: A name of `trainer.comm.codecs.registry`, or "none".
    """
    given = {key: knobs[key] for key in ("rank", "block") if knobs.get(key) is not None}
    density = knobs.get("density")
    if codec in ("none", "bf16"):
        return plain(shapes, 4 if codec == "none" else 2)
    if codec == "fp16":
        return fp16(shapes)
    if codec == "int8":
        return int8(shapes, **given)
    if codec == "topk":
        return sparse(shapes, ranks, 0.01 if density is None else density, 2)
    if codec == "dgc":
        return sparse(shapes, ranks, 0.001 if density is None else density, 4)
    if codec == "sign":
        return sign(shapes, ranks)
    if codec == "powersgd":
        return powersgd(shapes, **given)
    return blocksparse(shapes, ranks, **given)


def decodes(codec: str, ranks: int) -> int:
    """Return the payloads of a bucket's size that a rank decodes."""
    return ranks if codec in GATHERED else 1
