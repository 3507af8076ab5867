"""Recomputes chosen blocks in the backward pass instead of keeping their activations."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.blocks import find_blocks
from trainer.callback import Callback, Role
from trainer.errors import ConfigError

KEY = "callbacks.activation_checkpoint.blocks"


class ActivationCheckpoint(Callback):
    """Recomputes blocks in the backward pass (Chen et al. 2016, arXiv:1604.06174).

    A recomputed block keeps its inputs only, and its forward pass runs twice: a third more FLOPs if all blocks do. Bits
    do not change: dropout draws the same numbers the second time.

    Args:
        blocks: Class names of the modules to recompute; null takes `recipe.blocks`, or the members of
            the longest `nn.ModuleList`.
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
        for block in find_blocks(trainer.recipe, model, self.blocks, KEY)[:: self.every]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return model
