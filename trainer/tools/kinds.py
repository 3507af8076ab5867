"""The classes of Echelon's callbacks, for tools that ask each of them."""

import functools
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from trainer.callback import Callback
from trainer.config.compose import CONF
from trainer.config.targets import LIBRARIES, locate


@functools.cache
def kinds() -> Mapping[str, type[Callback]]:
    """Return the class of each callback that conf/ has, by name."""
    found: dict[str, Any] = {}
    for path in sorted((CONF / "callbacks").glob("*.yaml")):
        node: Any = OmegaConf.load(path)
        found[path.stem] = locate(f"callbacks.{path.stem}._target_", node[path.stem]["_target_"], LIBRARIES)
    return found
