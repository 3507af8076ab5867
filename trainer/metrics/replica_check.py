"""Compares the weights of all ranks bit for bit, because equal starts and equal steps must keep them equal."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.slices import local
from trainer.context import Context
from trainer.errors import NumericsError

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def check(trainer: Context) -> None:
    """Compare the weights of replicas every `trainer.check_replicas_every` steps, unless a callback lets them differ.

    It sends 16 bytes per tensor, and temporarily needs 8 bytes for each element of the largest tensor. If a rank
    differs, NumericsError is raised on all ranks.
    """
    every, group = trainer.options.check_replicas_every, trainer.strategy.replicas
    assert every
    if trainer.step % every or trainer.global_model is not trainer.module:
        return
    named = dict(trainer.module.named_parameters())
    own = torch.stack([checksum(local(p.detach())) for p in named.values()])
    both = torch.stack([own, ~own])
    if group is not None:
        dist.all_reduce(both, dist.ReduceOp.MIN, group=group)
    differs = not torch.equal(both[0], ~both[1])  # the smallest checksum is not the largest
    if not trainer.ranks.agree((int(differs),))()[0]:
        return
    found = trainer.ranks.gather(_others(own, group, list(named)))
    ranks, name = next(filter(None, found))
    raise NumericsError(
        f"trainer.check_replicas_every={every}: after step {trainer.step} the weights of rank "
        f"{', '.join(map(str, ranks))} differ from those of most ranks, {name} first; find code that changes weights "
        "on some ranks only, or check the hardware, and resume an earlier checkpoint"
    )


def _others(own: Tensor, group: dist.ProcessGroup | None, names: list[str]) -> tuple[list[int], str] | None:
    """Return the ranks whose checksums differ from the majority's, and the first such tensor's name."""
    if group is None:
        return None
    rows = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(rows, own, group=group)
    sums = dict(zip(dist.get_process_group_ranks(group), (row.tolist() for row in rows), strict=True))
    usual = Counter(map(tuple, sums.values())).most_common(1)[0][0]
    if others := [rank for rank, row in sums.items() if tuple(row) != usual]:
        return others, next(name for name, a, b in zip(names, sums[others[0]], usual, strict=True) if a != b)
    return None


def checksum(tensor: Tensor) -> Tensor:
    """Sum the tensor's bits as integers. A single differing element always changes the sum."""
    return tensor.reshape(-1).view(INTEGERS.get(tensor.element_size(), torch.int64)).sum()
