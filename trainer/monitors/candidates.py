"""Finds out which callbacks a run would take beside its own, so that advice names no other."""

from typing import Any

from omegaconf import OmegaConf

from trainer.composition import arrange
from trainer.config.build import build
from trainer.config.compose import CONF
from trainer.config.targets import LIBRARIES
from trainer.context import Context
from trainer.errors import ConfigError


def accepts(trainer: Context, name: str, **knobs: Any) -> bool:
    """Return whether the run takes this callback, with its YAML's knobs but for `knobs`, beside those that it has."""
    node: Any = OmegaConf.to_container(OmegaConf.load(CONF / "callbacks" / f"{name}.yaml"))
    try:
        candidate = build(f"callbacks.{name}", node[name] | knobs, LIBRARIES)
        arrange({**trainer.callbacks, f"another {name}": candidate}, trainer.plan.features())
    except ConfigError:
        return False
    return True
