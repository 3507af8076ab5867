"""Reduces in two levels, inside each node first, so that a node's ranks share the bytes that cross the network."""

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.callback import Callback, Role
from trainer.comm.bucket import Bucket
from trainer.comm.reduce import AllReduce, Reduce, all_gather, reduce_scatter
from trainer.errors import ConfigError, require
from trainer.log import log


class Hierarchical(Callback):
    """Reduce-scatter inside the node, all-reduce across nodes, all-gather inside (Jia et al. 2018, arXiv:1807.11205,
    who have an all-reduce inside and a leader across). Exact to rounding: the order of summation is another one.

    Args:
        ranks_per_node: null: as many as the launcher started on each node.
    """

    role = Role.REDUCE
    communicates = True

    def __init__(self, ranks_per_node: int | None = None) -> None:
        require("callbacks.hierarchical.ranks_per_node", ranks_per_node, at_least=1)
        self.ranks_per_node = ranks_per_node

    def wrap_reduce(self, trainer, reduce: Reduce) -> "TwoLevel":
        world, per_node = trainer.world, self.ranks_per_node or trainer.ranks.ranks_per_node()
        if world % per_node:
            raise ConfigError(
                f"callbacks.hierarchical.ranks_per_node={per_node}: does not divide the {world} ranks; "
                "start as many on each node, or leave hierarchical out"
            )
        if per_node in (1, world):
            log.info("hierarchical: %d ranks on %d node(s) are one level", world, world // per_node)
        nodes = torch.arange(world).view(-1, per_node)
        return TwoLevel(trainer.ranks.new_groups(nodes.tolist()), AllReduce(trainer.ranks.new_groups(nodes.T.tolist())))


class TwoLevel:
    """The mean over all ranks, of which `inside` are this node's; `across` reduces what this rank has of it."""

    def __init__(self, inside: dist.ProcessGroup, across: AllReduce) -> None:
        self.inside, self.per_node, self.local_rank = inside, inside.size(), inside.rank()
        self.nodes, self.node = across.size, across.group.rank()
        self.across: Reduce = across

    def own(self, bucket: Bucket) -> Bucket:
        """What of it this rank sends across; nothing where it has more ranks than elements."""
        size = -(-sum(stop - start for _, start, stop in bucket.pieces) // self.per_node)
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
