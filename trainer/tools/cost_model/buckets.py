"""Lays gradients out into buckets as DDP does, and finds each bucket's share of the passes."""

import math
from typing import NamedTuple

from trainer.tools.cost_model.messages import Shapes
from trainer.tools.cost_model.setup import Setup

MIB = 1 << 20
FIRST_MIB, DEFAULT_MIB = 1.0, 25.0  # DDP's
OVERLAP_MIB = 1.0  # overlap's own default on gloo
TABLE = 8  # a matrix with so many times more rows than columns is a table: reading it computes nothing


class Bucket(NamedTuple):
    """Gradients that are reduced together."""

    shapes: Shapes
    elements: int
    share: float  # of the backward pass, since the bucket before was ready
    first: int  # the smallest index of its parameters: the forward pass needs it then


def limits(setup: Setup) -> list[float]:
    """Return the sizes of buckets in MiB, in the order of reduction; the last holds for all further buckets."""
    mib = setup.settings.get("trainer.ddp.bucket_mib")
    if "bucket" in setup.callbacks:
        own = setup.callbacks["bucket"]
        if own["mibs"]:
            return list(own["mibs"])
        mib = DEFAULT_MIB if own["mib"] == "auto" else own["mib"]
        return [own["first_mib"] or mib, mib]
    if mib is None:
        return [OVERLAP_MIB] if "overlap" in setup.callbacks else [FIRST_MIB, DEFAULT_MIB]
    return [mib]


def shapes_of(setup: Setup) -> Shapes:
    """Return the parameters' shapes; squares if they are not known."""
    workload = setup.workload
    return workload.shapes or tuple((max(1, round(n**0.5)),) * 2 if n > 4096 else (n,) for n in workload.parameters)


def shares(setup: Setup) -> list[float]:
    """Return each parameter's share of the passes: measured, or that of its elements without tables and vectors."""
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


def lay_out(setup: Setup) -> list[Bucket]:
    """Fill buckets in the order in which gradients become ready, the reverse of the model's (Li et al. 2020)."""
    sizes, shapes, share = limits(setup), shapes_of(setup), shares(setup)
    all_shares = sum(share[i] for i in setup.own)
    buckets: list[Bucket] = []
    held: list[int] = []
    for index in reversed(setup.own):
        held.append(index)
        limit = sizes[min(len(buckets), len(sizes) - 1)] * MIB
        elements = sum(setup.workload.parameters[i] for i in held)
        if index == setup.own[0] or 4 * elements >= limit:
            part = sum(share[i] for i in held) / all_shares if all_shares else 1 / len(setup.own)
            buckets.append(Bucket([shapes[i] for i in held], elements, part, min(held)))
            held = []
    return buckets
