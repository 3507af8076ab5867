"""Stage 1: DDP whose ranks each keep the optimizer state of their own parameters."""

from collections.abc import Collection

from torch import Tensor, nn

from trainer.callbacks.shard.owners import Owners
from trainer.comm.reduce import Reduce
from trainer.context import Context
from trainer.parallel.ddp import DDP


class ZeRO1(DDP):
    """DDP with optimizer state in parts, by whole parameters (Rajbhandari et al. 2019, arXiv:1910.02054, P_os).

    Gradients are reduced as in DDP, so weights have the bits of plain training.

    Args:
        reduce: The chain; None: DDP's own reducer.
    """

    def __init__(self, trainer: Context, module: nn.Module, reduce: Reduce | None) -> None:
        super().__init__(module, trainer.rank, trainer.world, trainer.device, trainer.ddp, reduce, lambda: trainer.step)
        self.owners = Owners(self.parameters, trainer.ranks.new_group())
        self.owned: Collection[Tensor] | None = self.owners.own
