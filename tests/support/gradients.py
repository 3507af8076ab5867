"""Gradients of several kinds in one flat tensor, and a codec's way there and back without ranks."""

import torch
from torch import Tensor

from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import Codec
from trainer.comm.reduce import AllReduce


class Alone(AllReduce):
    """One rank, as many times as there are ranks."""

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def gather(self, own: Tensor) -> Tensor:
        return torch.stack([own] * self.size)


def bucket(flat: Tensor, step: int = 0) -> Bucket:
    return Bucket.of([flat], step)


def sent(codec: Codec, flat: Tensor, step: int = 0) -> Tensor:
    out = torch.zeros_like(flat)
    codec.decode(codec.encode(flat, bucket(flat, step)), out, 1.0, bucket(flat, step))
    return out


def normal(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0))


def heavy_tailed(n: int) -> Tensor:
    return normal(n) * torch.exp(2 * normal(n).roll(1))


def mostly_zero(n: int) -> Tensor:
    return normal(n) * (normal(n).roll(1) > 1.2816)
