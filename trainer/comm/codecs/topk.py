"""Sends the largest gradients only."""

import torch
from torch import Tensor

from trainer.comm.bucket import Bucket
from trainer.comm.codecs.sparse import Sparse
from trainer.comm.reduce import Reduce


class TopK(Sparse):
    """The largest in magnitude of each bucket (Aji and Heafield 2017, arXiv:1704.05021), gathered, with error feedback.

    Approximate in what is sent in a step; a magnitude that samples tell replaces a sort. Values travel as bfloat16;
    what that takes off stays with what is not sent. Bytes: 4 * density * n + n / 16384 from each rank to each other.

    Args:
        density: Share of a bucket's elements that a rank sends.
    """

    feedback: bool = True
    dtype: torch.dtype = torch.bfloat16

    def __init__(self, density: float = 0.01) -> None:
        super().__init__(density)

    def mean(self, flat: Tensor, out: Tensor, bucket: Bucket, reduce: Reduce) -> None:
        values, indices = self.select(flat, bucket)
        if out is not flat:
            rounded_off = (values - values.to(self.dtype)).nan_to_num_(0.0, 0.0, 0.0).to(flat.dtype)
            # Filled first: by subtraction a value that is not finite would stay for ever.
            flat.index_fill_(0, indices, 0.0).index_add_(0, indices, rounded_off)
        self.send(self.pack(values, indices, flat.numel()), out, bucket, reduce)
