"""Finds the further callbacks that a run would accept, so that advice names no others."""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from trainer.callback import Callback
from trainer.composition import arrange
from trainer.config.build import build
from trainer.config.folders import CONF
from trainer.config.targets import LIBRARIES
from trainer.context import Context
from trainer.errors import ConfigError


def made(name: str, knobs: Mapping[str, Any]) -> Callback:
    """Build this callback from its YAML, with `knobs` replaced."""
    node: Any = OmegaConf.to_container(OmegaConf.load(CONF / "callbacks" / f"{name}.yaml"))
    return build(f"callbacks.{name}", node[name] | knobs, LIBRARIES)


def accepts(trainer: Context, name: str, **knobs: Any) -> bool:
    """Return whether the run accepts this callback with these knobs, in addition to its own callbacks."""
    try:
        arrange({**trainer.callbacks, f"another {name}": made(name, knobs)}, trainer.plan.features())
    except ConfigError:
        return False
    return True
