"""Lays gradients out into buckets as DDP does, and finds each bucket's share of the passes."""

import functools
import math
from collections.abc import Sequence

from trainer.cost.messages import Shapes
from trainer.cost.setup import Bucket, Setup

MIB = 1 << 20
FIRST_MIB, DEFAULT_MIB = 1.0, 25.0  # DDP's
MOST = 64  # stretches of a backward pass that are simulated one by one
TABLE = 8  # a matrix with so many times more rows than columns is a table: reading it computes nothing


def stretches(setup: Setup) -> list[tuple[Bucket, ...]]:
    """Return the buckets in at most `MOST` groups of neighbours, which errs by at most 1 / MOST of the time on the
    wire.
    """
    buckets = lay_out(setup)
    each = -(-len(buckets) // MOST)
    return [buckets[i : i + each] for i in range(0, len(buckets), each)]


def joined(buckets: Sequence[Bucket]) -> Bucket:
    shapes = tuple(shape for bucket in buckets for shape in bucket.shapes)
    sums = sum(bucket.elements for bucket in buckets), sum(bucket.share for bucket in buckets)
    return Bucket(shapes, *sums, min(bucket.first for bucket in buckets))


def limits(setup: Setup) -> list[float]:
    """Return the bucket sizes in MiB in the order of reduction; the last one applies to all further buckets."""
    for cost in setup.costs.values():
        if cost.bucket_mibs:
            return list(cost.bucket_mibs)
    if (mib := setup.settings.get("trainer.ddp.bucket_mib")) is not None:
        return [mib]
    defaults = filter(None, (cost.default_mibs(setup) for cost in setup.costs.values()))
    return list(next(defaults, (FIRST_MIB, DEFAULT_MIB)))


def shapes_of(setup: Setup) -> Shapes:
    """Return the parameters' shapes; square matrices if they are unknown."""
    workload = setup.workload
    return workload.shapes or tuple((max(1, round(n**0.5)),) * 2 if n > 4096 else (n,) for n in workload.parameters)


def shares(setup: Setup) -> list[float]:
    """Return each parameter's share of the passes: as measured, or its share of the elements in non-table matrices."""
    workload, shapes = setup.workload, shapes_of(setup)
    if workload.compute:
        total = sum(workload.compute)
        return [share / total for share in workload.compute]
    weights = [
        0 if len(shape) < 2 or shape[0] >= TABLE * math.prod(shape[1:]) else elements
        for shape, elements in zip(shapes, workload.parameters, strict=True)
    ]
    total = sum(weights) or sum(workload.parameters)
    return [weight / total for weight in (weights if sum(weights) else workload.parameters)]


def lay_out(setup: Setup) -> tuple[Bucket, ...]:
    """Fill buckets in the order in which gradients become ready, the reverse of the model's (Li et al. 2020)."""
    workload = setup.workload
    return fill(tuple(limits(setup)), workload.parameters, tuple(shapes_of(setup)), tuple(shares(setup)), setup.own)


@functools.lru_cache(maxsize=64)  # a search asks for the same few thousands of times
def fill(
    sizes: tuple[float, ...], parameters: tuple[int, ...], shapes: Shapes, share: tuple[float, ...],
    own: tuple[int, ...],
) -> tuple[Bucket, ...]:  # fmt: skip
    """Fill buckets of `sizes` MiB with the parameters whose indices are in `own`."""
    all_shares = sum(share[i] for i in own)
    buckets: list[Bucket] = []
    held: list[int] = []
    elements = 0
    for index in reversed(own):
        held.append(index)
        elements += parameters[index]
        limit = sizes[min(len(buckets), len(sizes) - 1)] * MIB
        if index == own[0] or 4 * elements >= limit:
            part = sum(share[i] for i in held) / all_shares if all_shares else 1 / len(own)
            buckets.append(Bucket(tuple(shapes[i] for i in held), elements, part, min(held)))
            held, elements = [], 0
    return tuple(buckets)
