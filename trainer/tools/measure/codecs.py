"""Measures what a codec of trainer/comm/codecs costs a rank, without a network."""

import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from statistics import median

import torch
from torch import Tensor

from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import Codec, ErrorFeedback
from trainer.comm.codecs.registry import CODECS
from trainer.comm.reduce import AllReduce
from trainer.cost.machine import CodecCost
from trainer.parallel.warmup import wait
from trainer.tools.measure.device import fastest

ROUNDS, WARM = 5, 2  # rounds that count, and rounds in which codecs allocate their memory
SHAPE = (1024, 1024)  # of a parameter; as a matrix, since PowerSGD leaves vectors alone
PARAMETERS = 4
RANKS = (2, 6)  # whose means are timed


class Nowhere(AllReduce):
    """An all-reduce of ranks with the same payloads, over an infinitely fast network."""

    def __init__(self, ranks: int) -> None:
        self.size, self.bytes = ranks, 0

    def __call__(self, flat: Tensor, bucket: Bucket) -> Tensor:
        self.bytes += flat.nbytes
        return flat

    def gather(self, own: Tensor) -> Tensor:
        self.bytes += own.nbytes
        return torch.stack([own] * self.size)

    def swap(self, rows: Tensor) -> Tensor:
        self.bytes += rows.nbytes
        return rows.clone()


def by_name() -> dict[str, Codec]:
    """Return Echelon's codecs, with the error feedback that their papers have."""
    made = {name: codec() for name, codec in CODECS.items()}
    return {name: ErrorFeedback(codec) if codec.feedback else codec for name, codec in made.items()}


def measure(device: torch.device, codecs: Mapping[str, Codec]) -> dict[str, CodecCost]:
    """Return the cost of each codec on a bucket of 16 MiB of random gradients, with realistically heavy tails.

    `none` is the copy into a bucket and back, which a reduction without DDP needs.
    """
    params = [torch.empty(SHAPE, device=device) for _ in range(PARAMETERS)]
    generator = torch.Generator(device).manual_seed(0)
    gradients = torch.empty(sum(p.numel() for p in params), device=device).normal_(generator=generator)
    gradients *= torch.empty_like(gradients).normal_(generator=generator).exp_()
    bucket, size = Bucket.of(params, step=1), gradients.nbytes
    costs = {name: cost([mean_s(codec, gradients, bucket, n) / size for n in RANKS]) for name, codec in codecs.items()}
    return {"none": copy_cost(gradients, bucket), **costs}


def copy_cost(gradients: Tensor, bucket: Bucket) -> CodecCost:
    """Return the cost of copying gradients into a bucket, and back."""
    own, flat = [torch.empty_like(piece.param) for piece in bucket.pieces], gradients.clone()
    views = bucket.split(flat)
    there_s = fastest(lambda: torch._foreach_copy_(views, own), flat.device)
    return CodecCost(
        there_s / flat.nbytes, fastest(lambda: torch._foreach_copy_(own, views), flat.device) / flat.nbytes
    )


def cost(seconds: Sequence[float]) -> CodecCost:
    """Solve `encode + ranks * decode` for the seconds per byte measured on `RANKS`."""
    decode_s = max(0.0, (seconds[1] - seconds[0]) / (RANKS[1] - RANKS[0]))
    return CodecCost(max(0.0, seconds[0] - RANKS[0] * decode_s), decode_s)


def mean_s(codec: Codec, gradients: Tensor, bucket: Bucket, ranks: int) -> float:
    """Return the seconds of a mean over `ranks`, network excluded."""
    whole, flat, reduce = deepcopy(codec), gradients.clone(), Nowhere(ranks)
    whole.join(ranks, 0, 0)
    times: list[float] = []
    for _ in range(WARM + ROUNDS):
        flat.copy_(gradients)
        wait(flat.device)
        began = time.perf_counter()
        whole.mean(flat, flat, bucket, reduce)
        wait(flat.device)
        times.append(time.perf_counter() - began)
    return median(times[WARM:])
