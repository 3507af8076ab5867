"""Echelon from Python: `from echelon import Trainer`."""

from echelon import found as _found  # noqa: F401 its import is the check
from trainer import __version__
from trainer.callback import Callback, Role
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, LimitOptions, Options
from trainer.errors import ConfigError, DataError, NumericsError, UnavailableError
from trainer.launch.function import launch
from trainer.trainer import Trainer

__all__ = [
    "Callback",
    "CheckpointOptions",
    "ConfigError",
    "DDPOptions",
    "DataError",
    "DataOptions",
    "LimitOptions",
    "NumericsError",
    "Options",
    "Role",
    "Trainer",
    "UnavailableError",
    "__version__",
    "launch",
]
