"""Buckets: the layout of a flat tensor of gradients as pieces of parameters."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """Elements `start` to `stop` of a flattened parameter."""

    param: Tensor
    start: int
    stop: int


class Bucket:
    """The layout of a flat tensor: consecutive pieces of parameters, usually whole parameters.

    Args:
        step: The step that the gradients belong to; `trainer.step` may be ahead.
        kind: The kind of values, so that residuals of gradients and of weights are never mixed.
        whole: The pieces of the bucket that this one was cut from; other ranks have the rest.
    """

    def __init__(
        self, pieces: Iterable[Piece], step: int, kind: str = "gradients", whole: tuple[Piece, ...] = ()
    ) -> None:
        self.pieces, self.step, self.kind = tuple(pieces), step, kind
        self.whole = whole or self.pieces

    @classmethod
    def of(cls, params: Iterable[Tensor], step: int, kind: str = "gradients") -> "Bucket":
        return cls((Piece(p, 0, p.numel()) for p in params), step, kind)

    def numel(self) -> int:
        return sum(stop - start for _, start, stop in self.pieces)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return a view of each piece; a whole parameter has its shape."""
        parts = flat.split([stop - start for _, start, stop in self.pieces])
        pieces = zip(parts, self.pieces, strict=True)
        return [part.view(p.shape) if stop - start == p.numel() else part for part, (p, start, stop) in pieces]

    def gradients(self, flat: Tensor) -> list[Tensor]:
        """Return a view of each whole parameter's part, with the parameter's strides, as in DDP."""
        parts = flat.split([p.numel() for p, _, _ in self.pieces])
        return [
            part.as_strided(p.shape, p.stride(), part.storage_offset()) if dense(p) else part.view_as(p)
            for part, (p, _, _) in zip(parts, self.pieces, strict=True)
        ]

    def take_gradients(self, flat: Tensor) -> None:
        """Move the whole parameters' gradients into `flat`, as zeros if there is none."""
        params = [p for p, _, _ in self.pieces]
        torch._foreach_copy_(self.gradients(flat), [torch.zeros_like(p) if p.grad is None else p.grad for p in params])
        for p in params:
            p.grad = None

    def cut(self, start: int, stop: int) -> "Bucket":
        """Return the layout of elements `start` to `stop`; `stop` may be past the end."""
        pieces, offset = [], 0
        for p, first, last in self.pieces:
            low, high = max(first, first + start - offset), min(last, first + stop - offset)
            if low < high:
                pieces.append(Piece(p, low, high))
            offset += last - first
        return Bucket(pieces, self.step, self.kind, self.whole)


def dense(p: Tensor) -> bool:
    """Return whether the elements of `p` are contiguous in memory, in any order."""
    return sum((size - 1) * stride for size, stride in zip(p.shape, p.stride())) + 1 == p.numel()


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
