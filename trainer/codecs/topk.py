"""Sends the largest gradients only."""

from torch import Tensor

from trainer.codecs.sparse import Sparse, clear
from trainer.reduce import Bucket, Reduce


class TopK(Sparse):
    """The largest in magnitude of each bucket (Aji and Heafield 2017, arXiv:1704.05021), gathered, with error feedback.

    Approximate in what is sent in a step; a magnitude that samples tell replaces a sort. Bytes: 8 * density * n from
    each rank to each other.

    Args:
        density: Share of a bucket's elements that a rank sends.
    """

    feedback: bool = True

    def __init__(self, density: float = 0.01) -> None:
        super().__init__(density)

    def mean(self, flat: Tensor, out: Tensor, bucket: Bucket, reduce: Reduce) -> None:
        payload = self.encode(flat, bucket)
        clear(flat, payload)
        self.send(payload, out, bucket, reduce)
