"""Echelon: a PyTorch trainer whose distributed optimisations are callbacks and keys. Imports nothing heavy."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.trainer import Trainer as Trainer

__version__ = "0.1.0"
DISTRIBUTION = "echelon-trainer"


def __getattr__(name: str) -> Any:
    """Load `Trainer`, and with it torch, when a program asks for it."""
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainer.trainer import Trainer

    return Trainer
