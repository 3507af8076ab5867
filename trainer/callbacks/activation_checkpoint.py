"""Recomputes chosen blocks in the backward pass instead of keeping their activations."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.callback import Callback, Role
from trainer.errors import ConfigError


class ActivationCheckpoint(Callback):
    """Recomputes blocks in the backward pass (Chen et al. 2016, arXiv:1604.06174).

    A recomputed block keeps its inputs only, and its forward pass runs twice: a third more FLOPs if all blocks do. Bits
    do not change: dropout draws the same numbers the second time.

    Args:
        blocks: Class names of the modules to recompute; null takes the members of the longest `nn.ModuleList`.
        every: Recompute each `every`-th of them, counting from the first.
    """

    role = Role.RECOMPUTE

    def __init__(self, blocks: list[str] | None = None, every: int = 1) -> None:
        if every < 1:
            raise ConfigError(
                f"callbacks.activation_checkpoint.every={every}: must be at least 1, which recomputes every block"
            )
        self.blocks, self.every = blocks, every

    def wrap_model(self, trainer, model: nn.Module) -> nn.Module:
        for block in self.find(model)[:: self.every]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return model

    def find(self, model: nn.Module) -> list[nn.Module]:
        if self.blocks is None:
            lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
            found = list(max(lists, key=len)) if lists else []
        else:
            found = [module for module in model.modules() if type(module).__name__ in self.blocks]
        missing = set(self.blocks or ()) - {type(module).__name__ for module in found}
        if missing or not found:
            names = sorted({type(module).__name__ for module in model.modules() if list(module.children())})
            value = "null" if self.blocks is None else f"[{','.join(self.blocks)}]"
            what = ", ".join(sorted(missing)) or "nn.ModuleList with members"
            raise ConfigError(
                f"callbacks.activation_checkpoint.blocks={value}: no {what} in this model, which has {', '.join(names)}"
            )
        return found
