"""Wraps an optimizer to replace its step."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class OptimizerProxy:
    """Acts as `optimizer`, but with another `step`."""

    def __init__(self, optimizer: Optimizer, step: Callable[[], None]) -> None:
        self.optimizer, self.step = optimizer, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
