"""Compares the weights of all ranks bit for bit: ranks start from the same weights, and take the same steps."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.callback import TrainerProtocol
from trainer.errors import NumericsError

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def check(trainer: TrainerProtocol) -> None:
    """Compare weights every `trainer.check_replicas_every` steps, unless a callback lets ranks differ. A collective.

    The check sends 16 bytes a tensor. For a moment it needs 8 bytes for each element of the largest tensor.

    Raises:
        NumericsError: on all ranks, if one rank differs.
    """
    every = trainer.options.check_replicas_every
    if not every or trainer.step % every or trainer.world == 1 or trainer.global_model is not trainer.module:
        return
    named = dict(trainer.module.named_parameters())
    own = torch.stack([checksum(p) for p in named.values()]).cpu()
    dist.all_reduce(both := torch.stack([own, ~own]), dist.ReduceOp.MIN, group=trainer.ranks.host)
    if torch.equal(both[0], ~both[1]):  # the smallest sum is the largest
        return
    rows = trainer.ranks.gather(own.tolist())
    usual = Counter(map(tuple, rows)).most_common(1)[0][0]
    if others := [rank for rank, row in enumerate(rows) if tuple(row) != usual]:
        name = next(name for name, own, most in zip(named, rows[others[0]], usual, strict=True) if own != most)
        raise NumericsError(
            f"trainer.check_replicas_every={every}: after step {trainer.step} the weights of rank "
            f"{', '.join(map(str, others))} are not those of most, {name} first; mend code that changes them on some "
            "ranks only, or the hardware, and resume an earlier checkpoint"
        )


def checksum(tensor: Tensor) -> Tensor:
    """Sum the tensor's bits as integers: one element that differs always changes the sum."""
    return tensor.detach().reshape(-1).view(INTEGERS.get(tensor.element_size(), torch.int64)).sum()
