"""Assigns each parameter an owner: the rank that steps it and keeps its optimizer state."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.comm.bucket import flatten
from trainer.comm.reduce import AllReduce

ROUND_BYTES = 64 << 20  # bytes of weights that are gathered at a time


def assign(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank for each size: largest first, each to the rank with the least so far (Graham 1969)."""
    loads, found = [0] * ranks, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        found[i] = min(range(ranks), key=loads.__getitem__)
        loads[found[i]] += sizes[i]
    return found


def rounds(owned: Sequence[Sequence[Tensor]], most: int) -> Iterator[list[Sequence[Tensor]]]:
    """Split each rank's parameters into groups of one dtype; yield all ranks' first groups, then the second, and so on.

    A group has at most `most` bytes, unless a single parameter exceeds this.
    """
    for dtype in dict.fromkeys(p.dtype for params in owned for p in params):
        cut: list[list[Sequence[Tensor]]] = []
        for params in owned:
            groups: list[list[Tensor]] = [[]]
            for p in (p for p in params if p.dtype == dtype):
                if groups[-1] and sum(q.nbytes for q in groups[-1]) + p.nbytes > most:
                    groups.append([])
                groups[-1].append(p)
            cut.append([*groups])
        yield from map(list, zip_longest(*cut, fillvalue=()))


class Owners:
    """The parameters that each rank owns (ZeRO, Rajbhandari et al. 2019, arXiv:1910.02054).

    A rank steps only its own parameters, so any optimizer works that steps each parameter independently. `group` has
    all ranks, and is used only for weights.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.reduce, self.group, self.rank = AllReduce(group), group, group.rank()
        self.by_rank: list[list[nn.Parameter]] = [[] for _ in range(group.size())]
        for p, rank in zip(parameters, assign([p.numel() for p in parameters], group.size()), strict=True):
            self.by_rank[rank].append(p)
        self.own: set[Tensor] = set(self.by_rank[self.rank])
        self.others = [p for p in parameters if p not in self.own]
        self.rounds = list(rounds(self.by_rank, ROUND_BYTES // group.size()))

    def attach(self, optimizer: Optimizer) -> None:
        """Restrict the optimizer's steps to this rank's own parameters, and gather the weights after each step."""
        for p in self.others:
            optimizer.state.pop(p, None)  # some optimizers create state in the constructor
        optimizer.register_step_pre_hook(self._drop_gradients)
        optimizer.register_step_post_hook(self._gather_weights)

    def _drop_gradients(self, *_: Any) -> None:
        """Drop the gradients of other ranks' parameters, so that the optimizer keeps no state for them."""
        for p in self.others:
            p.grad = None

    @torch.no_grad()
    def _gather_weights(self, *_: Any) -> None:
        """Copy each rank's parameters to all ranks. A collective.

        Memory: `ROUND_BYTES`, or the largest parameter for each rank.
        """
        for groups in self.rounds:
            size = max(sum(p.numel() for p in params) for params in groups)
            like = next(p for params in groups for p in params)
            own = like.new_zeros(size)
            if mine := groups[self.rank]:
                own[: sum(p.numel() for p in mine)] = flatten(mine)
            for rank, (params, row) in enumerate(zip(groups, self.reduce.gather(own), strict=True)):
                if params and rank != self.rank:
                    parts = row[: sum(p.numel() for p in params)].split([p.numel() for p in params])
                    torch._foreach_copy_([*params], [part.view_as(p) for p, part in zip(params, parts, strict=True)])
