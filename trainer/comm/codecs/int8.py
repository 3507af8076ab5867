"""Sends gradients in 8 bits, with a scale for each block."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import Codec
from trainer.comm.codecs.chunks import chunks
from trainer.comm.reduce import AllReduce, Reduce
from trainer.cost.messages import Message, Shapes, elements
from trainer.errors import ConfigError


class Int8(Codec):
    """Quantises each block to multiples of 1/127 of its largest magnitude, the block's step.

    Paper: Alistarh et al. 2017, arXiv:1610.02132, with 127 levels and the maximum norm. Each rank sums one shard of all
    ranks' blocks in float32, and quantises the mean again. With error feedback, a shard's owner keeps this second error
    on behalf of all ranks. Stochastic rounding is unbiased (to 2^-17 of a step), and depends only on seed, step, rank
    and bucket. A block with a value that is not finite has no finite values afterwards.
    """

    gathers: bool = True

    def __init__(self, rounding: Literal["stochastic", "nearest"] = "stochastic", block: int = 256) -> None:
        super().__init__()
        if block < 4 or block % 4:
            raise ConfigError(f"codec.block={block}: int8 needs a positive multiple of 4; use 256")
        self.stochastic, self.block = rounding == "stochastic", block

    def messages(self, shapes: Shapes, ranks: int) -> list[Message]:
        size = elements(shapes) * (1 + 4 / self.block)
        return [Message("all_to_all", size), Message("all_gather", size)]

    def decodes(self, ranks: int) -> int:
        """Return 1, because decoding shards is part of encoding."""
        return 1

    def mean(self, flat: Tensor, out: Tensor, bucket: Bucket, reduce: Reduce) -> None:
        assert isinstance(reduce, AllReduce) and reduce.size == self.ranks
        noise = self.generator(flat.device, bucket) if self.stochastic else None
        own = -(-flat.numel() // (self.block * self.ranks))  # blocks in a shard
        # A record is a scale and the codes of a block.
        records = torch.empty(self.ranks * own, 4 + self.block, dtype=torch.uint8, device=flat.device)
        for chunk in chunks(len(records), flat.device, self.block):
            part, x = self._blocks(flat, chunk)
            quantise(x, records[chunk], noise)
            if out is not flat:
                part -= dequantise(records[chunk]).view(-1)[: len(part)]
        shards = reduce.swap(records.view(self.ranks, -1)).view(self.ranks, own, -1)
        shard = flat[self.rank * own * self.block : (self.rank + 1) * own * self.block]
        means = torch.empty_like(shards[0])
        for chunk in chunks(own, flat.device, self.block):
            x = dequantise(shards[0, chunk])
            for other in shards[1:]:
                x += dequantise(other[chunk])
            x /= self.ranks
            quantise(x, means[chunk], noise)
            if out is not flat:
                part, _ = self._blocks(shard, chunk)
                part += x.sub_(dequantise(means[chunk])).mul_(self.ranks).view(-1)[: len(part)]
        records = reduce.gather(means.view(-1)).view(self.ranks * own, -1)
        for chunk in chunks(len(records), flat.device, self.block):
            part, _ = self._blocks(out, chunk)
            part.copy_(dequantise(records[chunk]).view(-1)[: len(part)])

    def _blocks(self, flat: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        """Return the elements of these blocks, and (blocks, block) in float32 with zeros past the end."""
        part = flat[chunk.start * self.block : chunk.stop * self.block]
        lacking = (chunk.stop - chunk.start) * self.block - len(part)
        return part, (pad(part, (0, lacking)) if lacking else part).view(-1, self.block).float()


def quantise(x: Tensor, records: Tensor, noise: torch.Generator | None) -> None:
    """Write (blocks, block) float32 as (blocks, 4 + block) bytes."""
    # Slightly more than the largest / 127, so that rounding never gives a code above 127, with a finite inverse.
    scale = x.abs().amax(1, keepdim=True).mul_((1 + 2**-20) / 127).clamp_(min=2.0**-120)
    records[:, :4].view(torch.float32).copy_(scale)
    codes = x * scale.reciprocal_()
    if noise is not None:  # 16 bits each, 4 to a draw
        draws = torch.empty(x.numel() // 4, dtype=torch.int64, device=x.device).random_(-(2**63), None, generator=noise)
        codes.add_(draws.view(torch.int16).view_as(x).float(), alpha=2**-16)
    records[:, 4:].view(torch.int8).copy_(codes.add_(0.5).floor_())


def dequantise(records: Tensor) -> Tensor:
    return records[:, 4:].view(torch.int8).float().mul_(records[:, :4].view(torch.float32))
