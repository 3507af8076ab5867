"""Temporarily sets a model to training or eval mode."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Set the model to training mode if it is in eval as a whole; restore each module's mode at the end."""
    modes = [(module, module.training) for module in model.modules()]
    if not model.training:
        model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set the model to eval mode; restore each module's mode at the end, because a recipe may keep some in eval."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
