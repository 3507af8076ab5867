"""Sends a thousandth of the gradients, with momentum correction and clipping: deep gradient compression."""

import math
from typing import Annotated

import torch
from torch import Tensor

from trainer.annotated import AtMost, Beta, NonNegativeInt, PositiveFloat
from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import Residuals
from trainer.comm.codecs.sparse import Sparse
from trainer.comm.reduce import Reduce


class DGC(Sparse):
    """Deep gradient compression (Lin et al. 2018, arXiv:1712.01887): sends the largest accumulated elements.

    Each element has a velocity u = momentum * u + g and its sum v = v + u. The largest v are sent, and their u and v
    are reset to zero (factor masking). The unsent part stays here, so error feedback would add nothing. As in the
    authors' code, a rank clips its own gradient to clip_norm / sqrt(ranks) before accumulation, and a slice of a
    parameter separately. In the warm-up, each fifth of the steps sends 25 %, 6.25 %, 1.6 %, 0.4 % and 0.1 %, but at
    least `density`.
    """

    def __init__(
        self,
        density: Annotated[PositiveFloat, AtMost(1)] = 0.001,
        momentum: Beta = 0.0,
        clip_norm: PositiveFloat | None = None,
        warmup_steps: NonNegativeInt = 0,
    ) -> None:
        super().__init__(density)
        self.momentum, self.clip_norm, self.warmup_steps = momentum, clip_norm, warmup_steps
        self.u, self.v = Residuals(), Residuals()
        self.kept = {"u": self.u, "v": self.v}

    @property
    def residual_copies(self) -> float:
        return 1.0 + bool(self.momentum)

    def density_at(self, step: int) -> float:
        if step >= self.warmup_steps:
            return self.density
        return max(self.density, 0.25 ** (step * 5 // self.warmup_steps + 1))

    def mean(self, flat: Tensor, out: Tensor, bucket: Bucket, reduce: Reduce) -> None:
        if self.clip_norm is not None:
            clip(bucket.split(flat), self.clip_norm / math.sqrt(self.ranks))
        v = self.v.of(bucket, flat)
        u = self.u.of(bucket, flat) if self.momentum else None
        v += flat if u is None else torch.add(flat, u, alpha=self.momentum, out=u)
        values, indices = self.select(v, bucket)
        for kept in (v,) if u is None else (u, v):
            kept.index_fill_(0, indices, 0.0)  # a subtraction would keep values that are not finite
        if out is not flat:
            flat.zero_()
        self.send(self.pack(values, indices, flat.numel()), out, bucket, reduce)


def clip(gradients: list[Tensor], limit: float) -> None:
    """Clip each tensor to at most this norm, without a host sync. A tensor that contains NaN is unchanged."""
    for gradient in gradients:
        norm = torch.linalg.vector_norm(gradient)
        gradient *= torch.where(norm > limit, limit / norm, 1.0)
