"""Makes parameter groups, and the optimizer from them."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainer.errors import ConfigError

Groups = Iterable[dict[str, Any]]


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Return two groups: matrices, and parameters of fewer than two dimensions, which take no weight decay."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(optimizer: Callable[[Groups], Optimizer], module: nn.Module) -> Optimizer:
    """Make the optimizer of the module's parameter groups.

    Raises:
        ConfigError: The optimizer refuses its settings.
    """
    groups = parameter_groups(module)
    if not groups:
        raise ConfigError("recipe.model(): no parameter requires a gradient; unfreeze some parameters")
    try:
        return optimizer(groups)
    except ValueError as error:
        raise ConfigError(f"optimizer: {error}; correct the keys optimizer.*") from error
