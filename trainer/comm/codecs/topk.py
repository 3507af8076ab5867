"""Sends the largest gradients only."""

import torch
from torch import Tensor

from trainer.comm.bucket import Bucket
from trainer.comm.codecs.sparse import Sparse
from trainer.comm.reduce import Reduce


class TopK(Sparse):
    """Sends the largest elements of each bucket (Aji and Heafield 2017, arXiv:1704.05021), by all-gather.

    A threshold estimated from samples replaces a sort, so the choice is approximate. Values are sent as bfloat16, and
    the rounding error stays with the unsent part.
    """

    feedback: bool = True
    dtype: torch.dtype = torch.bfloat16

    def __init__(self, density: float = 0.01) -> None:
        super().__init__(density)

    def mean(self, flat: Tensor, out: Tensor, bucket: Bucket, reduce: Reduce) -> None:
        values, indices = self.select(flat, bucket)
        if out is not flat:
            rounded_off = (values - values.to(self.dtype)).nan_to_num_(0.0, 0.0, 0.0).to(flat.dtype)
            # Zeros first, because a subtraction would keep values that are not finite.
            flat.index_fill_(0, indices, 0.0).index_add_(0, indices, rounded_off)
        self.send(self.pack(values, indices, flat.numel()), out, bucket, reduce)
