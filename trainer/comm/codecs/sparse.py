"""Finds the largest elements of a flat tensor without sorting it; the base class of codecs that send them."""

import math
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer.annotated import AtMost, PositiveFloat
from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import Codec
from trainer.cost.messages import Shapes, elements
from trainer.rng import GOLDEN

MAGNITUDE = 0x7FFFFFFF  # a float32's bits except the sign: as integers they sort by magnitude, with NaN on top
SAMPLES = 1 << 16  # a threshold is estimated from this many elements, or up to twice as many
SIGMAS = 3.0  # standard deviations of the sampling by which the threshold is lowered below the estimate
BLOCK = 1 << 16  # elements; an index within a block has 16 bits
CHUNK = 1 << 18  # elements that are compared at once, so that temporaries stay in the CPU's cache


class Sparse(Codec):
    """Base class of codecs that send the `density * n` elements of largest magnitude, as values and 16-bit indices.

    `encode` and `decode` leave the elements unchanged; each codec has its own `mean`. A selection on a CPU takes three
    passes over all elements: magnitude, comparison, indices. They move 1.4 times the tensor's bytes if the cache holds
    a chunk of 1 MiB. On a GPU, a selection needs temporary memory of 1.25 tensors.
    """

    gathers: bool = True
    dtype: torch.dtype = torch.float32  # of the sent values

    def __init__(self, density: Annotated[PositiveFloat, AtMost(1)]) -> None:
        super().__init__()
        self.density = density

    def payload_bytes(self, shapes: Shapes) -> float:
        n = elements(shapes)
        return (self.dtype.itemsize + 2) * self.density * n + 4 * n / BLOCK

    def density_at(self, step: int) -> float:
        return self.density

    def select(self, flat: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
        return largest(flat, math.ceil(self.density_at(bucket.step) * flat.numel()), bucket.step)

    def encode(self, flat: Tensor, bucket: Bucket) -> Tensor:
        return self.pack(*self.select(flat, bucket), flat.numel())

    def decode(self, payload: Tensor, out: Tensor, weight: float, bucket: Bucket) -> None:
        values, indices = self.unpack(payload, out.numel())
        out.index_add_(0, indices, values.to(out.dtype), alpha=weight)

    def pack(self, values: Tensor, indices: Tensor, n: int) -> Tensor:
        """Pack values and indices into int32.

        The payload starts with the number of values up to the end of each block of 65,536 elements. Then follow the
        values, and the 16-bit position of each in its block. It consists of integers, because copying floats may alter
        a NaN.
        """
        ends = torch.arange(BLOCK, n + BLOCK, BLOCK, device=indices.device)
        until = torch.searchsorted(indices, ends).int()
        parts = [until.view(torch.int16), values.to(self.dtype).view(torch.int16), indices.short()]
        payload = torch.cat(parts)
        return pad(payload, (0, len(payload) % 2)).view(torch.int32)

    def unpack(self, payload: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return (k,), (k,): values, and their indices in ascending order."""
        starts = torch.arange(0, n, BLOCK, dtype=torch.int32, device=payload.device)
        until, rest = payload[: len(starts)], payload[len(starts) :].view(torch.int16)
        width = self.dtype.itemsize // 2
        k = len(rest) // (width + 1)
        counts = until.diff(prepend=until.new_zeros(1))
        values, low = rest[: width * k].view(self.dtype), rest[width * k : (width + 1) * k].int() & BLOCK - 1
        return values, starts.repeat_interleave(counts, output_size=k) + low


def largest(flat: Tensor, k: int, step: int) -> tuple[Tensor, Tensor]:
    """Return (k,), (k,): values and ascending indices of the elements of largest magnitude, never zeros.

    The choice is exact if at least k elements reach the threshold, which is `SIGMAS` below the estimate. If fewer reach
    it, one of them is repeated with the value 0. If many elements are equal, only the first 2k and a margin are
    compared. There is no host sync on a GPU.
    """
    flat = flat.float()
    bits = flat.view(torch.int32)
    threshold, room = estimate(bits, k, step)
    indices = reaching_cpu(bits, threshold, room) if bits.device.type == "cpu" else reaching(bits, threshold, room)
    indices = pad(indices, (0, max(0, k - len(indices))), value=-1)  # -1: not an element
    values = flat.index_select(0, indices.clamp(min=0)).masked_fill_(indices < 0, 0.0)
    if len(indices) > k:
        best = ascending((values.view(torch.int32) & MAGNITUDE).topk(k, sorted=False).indices)
        values, indices = values.index_select(0, best), indices.index_select(0, best)
    return values, torch.where(indices < 0, indices.max().clamp_(min=0), indices)


def ascending(indices: Tensor) -> Tensor:
    """Sort indices; on a CPU with numpy, which is several times faster."""
    return torch.from_numpy(np.sort(indices.numpy())) if indices.device.type == "cpu" else indices.sort().values


def estimate(bits: Tensor, k: int, step: int) -> tuple[Tensor, int]:
    """Estimate a magnitude that slightly more than k elements reach; return it and twice the number of these elements.

    The sample is every `stride`-th element, starting elsewhere in each step. The stride has no factor 2 or 3, which
    most row lengths have, so the sample includes all columns.
    """
    stride = len(bits) // SAMPLES | 1
    stride += 2 * (stride % 3 == 0)
    sample = bits[step * GOLDEN % stride :: stride] & MAGNITUDE
    share = k / len(bits) * len(sample)
    rank = math.ceil(share + SIGMAS * math.sqrt(share))
    if rank >= len(sample):
        return bits.new_ones(()), len(bits)
    return sample.topk(rank, sorted=False).values.amin().clamp_(min=1), min(2 * rank * stride, len(bits))


def reaching(bits: Tensor, threshold: Tensor, room: int) -> Tensor:
    """Return (room,): the indices of the first elements that reach the threshold, then -1."""
    return torch.nonzero_static(bits & MAGNITUDE >= threshold, size=room, fill_value=-1).view(-1)


def reaching_cpu(bits: Tensor, threshold: Tensor, room: int) -> Tensor:
    """Return the indices of the first `room` elements that reach the threshold.

    On one thread, numpy compares 3 times faster than torch, and finds indices 5 times faster. Allocating memory of the
    tensor's size would cost more than all of this.
    """
    everything, least, found = bits.numpy(), threshold.item(), []
    for start in range(0, len(bits), CHUNK):
        magnitude = np.bitwise_and(everything[start : start + CHUNK], MAGNITUDE)
        found.append(np.flatnonzero(np.greater_equal(magnitude, least)) + start)
    return torch.from_numpy(np.concatenate(found)[:room])
