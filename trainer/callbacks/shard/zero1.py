"""Stage 1: DDP whose ranks each keep the optimizer state of their own parameters."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainer.callback import TrainerProtocol
from trainer.callbacks.shard.owners import Owners
from trainer.checkpoint.parts import read_all
from trainer.checkpoint.serialize import load_optimizer_state, optimizer_state
from trainer.comm.reduce import Reduce
from trainer.parallel.ddp import DDP


class ZeRO1(DDP):
    """DDP with optimizer state in parts, by whole parameters (Rajbhandari et al. 2019, arXiv:1910.02054, P_os).

    Gradients are reduced as in DDP, so weights have the bits of plain training.

    Args:
        reduce: The chain; None: DDP's own reducer.
    """

    def __init__(self, trainer: TrainerProtocol, module: nn.Module, reduce: Reduce | None) -> None:
        super().__init__(module, trainer.rank, trainer.world, trainer.device, trainer.ddp, reduce, lambda: trainer.step)
        self.owners = Owners(self.parameters, trainer.ranks.new_group())

    def save(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """Return the optimizer state of this rank's own parameters. Rank 0 saves the weights."""
        own = self._own_names()
        states = optimizer_state(optimizer, self.module).items()
        return {"optimizer": {name: state for name, state in states if name in own}}

    def load(self, optimizer: Optimizer, sections: Mapping[str, Any]) -> None:
        self.module.load_state_dict(read_all(sections["model"]))
        if "optimizer" in sections:
            own, states = self._own_names(), sections["optimizer"].items()
            own_states = {name: read_all(state) if name in own else {} for name, state in states}
            load_optimizer_state(optimizer, self.module, own_states)

    def _own_names(self) -> set[str]:
        return {name for name, p in self.module.named_parameters() if p in self.owners.own}
