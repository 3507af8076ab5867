"""Whether all ranks still have the same weights, to the bit: they start from the same, and take the same steps."""

from collections import Counter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import NumericsError

if TYPE_CHECKING:
    from trainer.trainer import Trainer


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def check(trainer: "Trainer") -> None:
    """Each `trainer.check_replicas_every` steps, but where ranks are meant to differ. A collective of 16 bytes a
    tensor; for a moment it takes memory of 8 bytes an element of the largest.

    Raises:
        NumericsError: on all ranks, where one differs.
    """
    every = trainer.options.check_replicas_every
    if not every or trainer.step % every or trainer.world == 1 or trainer.global_model is not trainer.module:
        return
    named = dict(trainer.module.named_parameters())
    own = torch.stack([checksum(p) for p in named.values()]).cpu()
    dist.all_reduce(both := torch.stack([own, ~own]), dist.ReduceOp.MIN, group=trainer.ranks.host)
    if torch.equal(both[0], ~both[1]):  # the smallest is the largest
        return
    rows = trainer.ranks.gather(own.tolist())
    usual = Counter(map(tuple, rows)).most_common(1)[0][0]
    if others := [rank for rank, row in enumerate(rows) if tuple(row) != usual]:
        name = next(name for name, own, most in zip(named, rows[others[0]], usual, strict=True) if own != most)
        raise NumericsError(
            f"trainer.check_replicas_every={every}: after step {trainer.step} the weights of rank "
            f"{', '.join(map(str, others))} are not those of most, {name} first; mend code that changes them on some "
            "ranks only, or hardware, and go on from a checkpoint before"
        )


def checksum(tensor: Tensor) -> Tensor:
    """The sum of its bits as integers: one element that differs always shows."""
    return tensor.detach().reshape(-1).view(INTEGERS.get(tensor.element_size(), torch.int64)).sum()
