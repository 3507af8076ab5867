"""Averages in two levels: inside each node, then across nodes."""

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.bucket import Bucket
from trainer.comm.reduce import AllReduce, Reduce, all_gather, reduce_scatter


class TwoLevel:
    """The mean over all ranks. `inside` is this node's group; `across` reduces this rank's shard."""

    def __init__(self, inside: dist.ProcessGroup, across: AllReduce) -> None:
        self.inside, self.per_node, self.local_rank = inside, inside.size(), inside.rank()
        self.nodes, self.node = across.size, across.group.rank()
        self.across: Reduce = across

    def own(self, bucket: Bucket) -> Bucket:
        """Return the shard that this rank sends across; empty on some ranks if there are fewer elements than ranks."""
        size = -(-bucket.numel() // self.per_node)
        return bucket.cut(self.local_rank * size, (self.local_rank + 1) * size)

    def __call__(self, flat: Tensor, bucket: Bucket) -> Tensor:
        size = -(-flat.numel() // self.per_node)  # of a rank's shard; the last ones may be shorter, or empty
        padded = flat.new_zeros(size * self.per_node)
        torch.mul(flat, 1.0 / self.per_node, out=padded[: flat.numel()])
        shard = padded.new_empty(size)
        reduce_scatter(shard, padded, self.inside)
        own = shard[: max(0, flat.numel() - self.local_rank * size)]
        if own.numel():
            own.copy_(self.across(own, self.own(bucket)))
        all_gather(padded, shard, self.inside)
        return flat.copy_(padded[: flat.numel()])
