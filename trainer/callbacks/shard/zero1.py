"""Stage 1: DDP in which each rank keeps only the optimizer state of its own parameters."""

from collections.abc import Collection

from torch import Tensor, nn

from trainer.callbacks.shard.owners import Owners
from trainer.comm.reduce import Reduce
from trainer.context import Context
from trainer.parallel.ddp import DDP


class ZeRO1(DDP):
    """DDP with optimizer state sharded by whole parameters (Rajbhandari et al. 2019, arXiv:1910.02054, P_os).

    Gradients are reduced as in DDP, so weights are bit-equal to plain training's.

    Args:
        reduce: The Reduce chain; None: DDP's own reducer.
    """

    def __init__(self, trainer: Context, module: nn.Module, reduce: Reduce | None) -> None:
        super().__init__(module, trainer.rank, trainer.world, trainer.device, trainer.ddp, reduce, lambda: trainer.step)
        self.owners = Owners(self.parameters, trainer.ranks.new_group())
        self.owned: Collection[Tensor] | None = self.owners.own
