"""Sends matrices as products of two thin matrices."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from trainer.annotated import PositiveInt
from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import Codec
from trainer.comm.reduce import Reduce
from trainer.cost.messages import Message, Shapes
from trainer.rng import POWERSGD_START, mix


class PowerSGD(Codec):
    """PowerSGD (Vogels et al. 2019, arXiv:1905.13727): one step of power iteration, continued from the previous result.

    An m x n gradient (first dimension x all others) is sent as rank * (m + n) numbers, if these are fewer. Vectors,
    small matrices and parts of parameters are sent uncompressed with the first factors. A bucket takes two all-reduces.
    16-bit gradients are converted to float32.

    This rank's residual is its gradient minus P times its own Q, whereas the paper subtracts P times the mean of all
    Qs. Both have the same mean over ranks, on which alone the next mean gradient depends.

    Memory: rank * n numbers per matrix.

    Args:
        factors: With "bf16", half as many bytes are sent. What rounding takes away stays in the residual.
    """

    feedback: bool = True
    matrices: bool = True

    def __init__(self, rank: PositiveInt = 4, factors: Literal["fp32", "bf16"] = "fp32") -> None:
        super().__init__()
        self.columns, self.narrow = rank, factors == "bf16"
        self.shared["q"] = {}

    def messages(self, shapes: Shapes, ranks: int) -> list[Message]:
        return factors(shapes, self.columns, itemsize=2 if self.narrow else 4)

    def mean(self, flat: Tensor, out: Tensor, bucket: Bucket, reduce: Reduce) -> None:
        if flat.itemsize < 4:
            wide = flat.float()
            wide_out = wide if out is flat else torch.empty_like(wide)
            self.mean(wide, wide_out, bucket, reduce)
            flat.copy_(wide)
            out.copy_(wide_out)
            return
        split = list(zip(bucket.pieces, bucket.split(flat), bucket.split(out), strict=True))
        matrices = [(p.param, a.flatten(1), b.flatten(1)) for p, a, b in split if self.compresses(a)]
        plain = [(a, b) for _, a, b in split if not self.compresses(a)]

        # `linear` reads the matrix along its rows, and takes half as long as Q times the transposed matrix.
        ps = [linear(sent, orthonormal(self.q(param, sent))) for param, sent, _ in matrices]
        means = self._average([sent for sent, _ in plain] + ps, bucket, reduce)
        for (sent, out_part), mean in zip(plain, means):
            if self.narrow:
                sent.sub_(self._sent(sent))
            else:
                sent.zero_()
            out_part.copy_(mean)
        ps, qs = [orthonormal(p.t()) for p in means[len(plain) :]], []
        for (_, sent, _), p in zip(matrices, ps, strict=True):
            qs.append(self._sent(p @ sent))
            if out is not flat:
                sent.addmm_(p.t(), qs[-1], alpha=-1)
        for (param, _, out_part), p, q in zip(matrices, ps, self._average(qs, bucket, reduce), strict=True):
            torch.mm(p.t(), q, out=out_part)
            self._keep(param, q)

    def _sent(self, values: Tensor) -> Tensor:
        """Return the values that other ranks get, so that the residual has what rounding took away."""
        return values.bfloat16().to(values.dtype) if self.narrow else values

    def _average(self, tensors: list[Tensor], bucket: Bucket, reduce: Reduce) -> list[Tensor]:
        if not tensors:
            return []
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        wide = flat.dtype
        flat = reduce(flat.bfloat16() if self.narrow else flat, bucket.cut(0, len(flat))).to(wide)
        return [part.view_as(x) for part, x in zip(flat.split([x.numel() for x in tensors]), tensors, strict=True)]

    def compresses(self, piece: Tensor) -> bool:
        m, n = (1, 1) if piece.dim() < 2 else piece.flatten(1).shape
        return self.columns * (m + n) < m * n

    def q(self, param: Tensor, grad: Tensor) -> Tensor:
        """Return Q, transposed. The first Q is normally distributed, and equal on all ranks whatever the buckets."""
        m, n = grad.flatten(1).shape
        q = self.shared["q"].get(param)
        if q is None or q.shape != (self.columns, n):
            generator = torch.Generator().manual_seed(mix(self.seed, POWERSGD_START, m, n) >> 1)
            q = torch.randn(self.columns, n, generator=generator, dtype=grad.dtype)
            q = self.shared["q"][param] = q.to(grad.device)
        return q

    def _keep(self, param: Tensor, q: Tensor) -> None:
        """Keep `q` as the start of the next step, except for rows that are zero or not finite."""
        norms = torch.linalg.vector_norm(q, dim=1, keepdim=True)
        self.shared["q"][param] = torch.where((norms > 0) & norms.isfinite(), q, self.shared["q"][param])


def factors(shapes: Shapes, rank: int, least: float = 1.0, itemsize: int = 4) -> list[Message]:
    """Return PowerSGD's two all-reduces if it compresses matrices that become at least `least` times smaller."""
    first = second = 0
    for m, n in ((shape[0], math.prod(shape[1:])) for shape in shapes):
        thin = n > 1 and rank * (m + n) * least < m * n
        first, second = first + (rank * m if thin else m * n), second + (rank * n if thin else 0)
    return [Message("all_reduce", itemsize * first), Message("all_reduce", itemsize * second)]


def orthonormal(rows: Tensor) -> Tensor:
    """Return orthonormal rows that span the same space. Zero rows are replaced with orthonormal ones."""
    return torch.linalg.qr(rows.t()).Q.t()
