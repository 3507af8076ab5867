"""Sends one bit per element; packs and unpacks bits."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import Codec
from trainer.comm.codecs.chunks import chunks
from trainer.cost.messages import Shapes, elements

# Multiplying 8 bytes of 0 or 1 by this moves byte i's bit to bit 56 + i; no two terms of the product collide.
SPREAD = 0x0102040810204080


class Sign(Codec):
    """EF-signSGD (Karimireddy et al. 2019, arXiv:1901.09847): the signs and the mean magnitude of each piece.

    A piece is a parameter or part of one. Zero counts as positive. With 64 ranks or more, gathering takes more bytes
    than an all-reduce in float32. A piece with a value that is not finite has no finite values afterwards.
    """

    gathers: bool = True
    feedback: bool = True

    def payload_bytes(self, shapes: Shapes) -> float:
        return sign_bytes(shapes)

    def encode(self, flat: Tensor, bucket: Bucket) -> Tensor:
        pieces = [piece.view(-1) for piece in bucket.split(flat)]
        scales, bits = [], []
        for piece in pieces:
            norms = []
            for chunk in chunks(len(piece), flat.device):
                norms.append(piece[chunk].abs().sum(dtype=torch.float32))
                bits.append(pack(piece[chunk] >= 0))
            total = torch.stack(norms).sum() if norms else flat.new_zeros((), dtype=torch.float32)
            scales.append(total / max(len(piece), 1))
        return torch.cat([torch.stack(scales).view(torch.uint8), *bits])

    def decode(self, payload: Tensor, out: Tensor, weight: float, bucket: Bucket) -> None:
        pieces = [piece.view(-1) for piece in bucket.split(out)]
        # Copied because a row of several payloads need not start at a multiple of 4 bytes.
        scales = payload[: 4 * len(pieces)].clone().view(torch.float32) * weight
        table, start = 2.0 * table_of_bits(out.device) - 1.0, 4 * len(pieces)
        for piece, scale in zip(pieces, scales, strict=True):
            scaled = table * scale
            for chunk in chunks(len(piece), out.device):
                part = piece[chunk]
                stop = start + -(-len(part) // 8)
                part += scaled.index_select(0, payload[start:stop].int()).view(-1)[: len(part)]
                start = stop


def sign_bytes(shapes: Shapes) -> float:
    """Return the bytes of one bit per element and one scale per parameter."""
    return elements(shapes) / 8 + 4 * len(shapes)


def pack(bits: Tensor) -> Tensor:
    """Pack (n,) bool into (ceil(n / 8),) uint8, the first in the lowest bit."""
    bits = pad(bits, (0, -len(bits) % 8)) if len(bits) % 8 else bits
    return bits.view(torch.int64).mul(SPREAD).bitwise_right_shift_(56).to(torch.uint8)


def unpack(packed: Tensor, count: int) -> Tensor:
    """Return the first `count` bits, as bool."""
    return table_of_bits(packed.device).bool().index_select(0, packed.int()).view(-1)[:count]


def table_of_bits(device: torch.device) -> Tensor:
    """Return (256, 8): the bits of each byte, the lowest first."""
    return torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
