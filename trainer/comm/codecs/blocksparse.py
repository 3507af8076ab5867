"""Omits blocks that are zero on all ranks: exact, and useful for embeddings and masked layers."""

import torch
from torch import Tensor

from trainer.annotated import PositiveInt
from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import Codec
from trainer.comm.codecs.chunks import chunks
from trainer.comm.codecs.sign import pack, unpack
from trainer.comm.reduce import AllReduce, Reduce
from trainer.cost.messages import Message, Shapes, elements, plain

WORTHWHILE = 1 / 32  # fraction of the blocks; omitting fewer costs more than sending all


class BlockSparse(Codec):
    """Sends nonzero blocks only, by all-reduce, like OmniReduce (Fei et al. 2021, doi:10.1145/3452296.3472904).

    Ranks exchange masks of their nonzero blocks, and reduce the blocks that are nonzero on any rank. The mean is exact
    up to the rounding of a sum in another order, and 0.0 if all ranks have -0.0. The rest of a bucket after its last
    whole block is always sent. The host reads the number of blocks, and therefore waits for a GPU.
    """

    exact: bool = True
    gathers: bool = True

    def __init__(self, block: PositiveInt = 256) -> None:
        super().__init__()
        self.block = block

    def messages(self, shapes: Shapes, ranks: int) -> list[Message]:
        """Return the collectives if hardly any block is zero, as when an embedding is also the output layer."""
        return [Message("all_gather", ranks * elements(shapes) / self.block / 8), *plain(shapes)]

    def decodes(self, ranks: int) -> int:
        return 1

    def mean(self, flat: Tensor, out: Tensor, bucket: Bucket, reduce: Reduce) -> None:
        assert isinstance(reduce, AllReduce)
        count = flat.numel() // self.block
        whole = count * self.block
        blocks = flat[:whole].view(count, self.block)
        chosen = self._chosen(blocks, reduce) if count else None
        if chosen is None or count - len(chosen) < WORTHWHILE * count:
            out.copy_(reduce(flat, bucket))
        else:
            sent = len(chosen) * self.block
            payload = flat.new_empty(sent + flat.numel() - whole)
            torch.index_select(blocks, 0, chosen, out=payload[:sent].view(-1, self.block))
            payload[sent:] = flat[whole:]
            payload = reduce(payload, bucket.cut(0, len(payload)))
            out.zero_()
            out[:whole].view(count, self.block).index_copy_(0, chosen, payload[:sent].view(-1, self.block))
            out[whole:] = payload[sent:]
        if out is not flat:
            flat.zero_()

    def _chosen(self, blocks: Tensor, reduce: AllReduce) -> Tensor:
        tops = torch.cat([blocks[chunk].abs().amax(1) for chunk in chunks(len(blocks), blocks.device, self.block)])
        union, *masks = reduce.gather(pack(tops != 0))  # NaN is not 0, and makes a block's largest NaN
        for mask in masks:
            union |= mask
        return unpack(union, len(blocks)).nonzero().view(-1)
