"""Sets a model to training or to eval for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Set the model to training if it is in eval as a whole, as a run does, and each module back at the end."""
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
    """Set the model to eval, and each module back at the end: a recipe may keep some in eval."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
