"""Codecs on real ranks: what comes out, what is kept, and how many bytes a rank sends."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.comm.bucket import Bucket, Piece
from trainer.comm.codecs.base import Codec, ErrorFeedback
from trainer.comm.ranks import Ranks
from trainer.comm.reduce import AllReduce
from trainer.process.environment import Place


class Job(NamedTuple):
    codec: Codec
    values: np.ndarray  # (ranks, steps, elements)
    pieces: tuple[tuple[tuple[int, ...], int, int], ...] = ()  # a parameter's shape, start and stop; one vector if none
    dtype: torch.dtype = torch.float32


class Done(NamedTuple):
    means: np.ndarray  # (steps, elements)
    residual: np.ndarray
    bytes: float


class Counted(AllReduce):
    """What a ring's all-reduce, an all-gather and an all-to-all send of a rank, at the least."""

    bytes = 0.0

    def __call__(self, flat: Tensor, bucket: Bucket) -> Tensor:
        self.bytes += 2 * (self.size - 1) / self.size * flat.nbytes
        return super().__call__(flat, bucket)

    def gather(self, own: Tensor) -> Tensor:
        self.bytes += (self.size - 1) * own.nbytes
        return super().gather(own)

    def swap(self, rows: Tensor) -> Tensor:
        self.bytes += (self.size - 1) / self.size * rows.nbytes
        return super().swap(rows)


def average(place: Place, jobs: list[Job]) -> list[Done]:
    ranks, done = Ranks(place, "cpu", "gloo", 60.0), []
    group = ranks.new_group()
    for codec, values, shapes, dtype in jobs:
        reduce, means, flat = Counted(group), [], torch.empty(0)
        codec.join(place.world, place.rank, 0)
        shapes = shapes or (((values.shape[2],), 0, values.shape[2]),)
        pieces = [Piece(torch.empty(shape), start, stop) for shape, start, stop in shapes]
        for step, value in enumerate(values[place.rank]):
            flat = torch.tensor(value).to(dtype)
            codec.mean(flat, flat, Bucket(pieces, step), reduce)
            means.append(flat.double().numpy())
        left = (
            codec.residual.of(Bucket(pieces, 0), flat) if isinstance(codec, ErrorFeedback) else torch.zeros_like(flat)
        )
        done.append(Done(np.stack(means), left.double().numpy(), reduce.bytes / len(means)))
    ranks.close()
    return done


def balance(done: list[Done], values: np.ndarray) -> np.ndarray:
    """Of the mean: all that was sent, and is still kept, less all that was given."""
    kept = np.mean([rank.residual for rank in done], axis=0)
    return done[0].means.sum(0) + kept - values.astype(float).mean(0).sum(0)
