"""Builds objects from a checked config."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from trainer.config.schema import option_parameters
from trainer.config.targets import locate

T = TypeVar("T")


def arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name not in ("_target_", "_partial_")}


def build_options(options: type[T], values: Mapping[str, Any]) -> T:
    """Return the dataclass `options` from its section of the config, and dataclasses inside of it from theirs."""
    given = dict(values)
    for name, knob in option_parameters(options).items():
        if dataclasses.is_dataclass(knob.annotation) and name in given:
            given[name] = build_options(knob.annotation, given[name])  # pyright: ignore[reportArgumentType] it is a type
    return options(**given)


def build(key: str, node: Mapping[str, Any], allow: tuple[str, ...]) -> Any:
    """Return the object that `node` describes; with `_partial_` a function that still takes its first arguments."""
    target = locate(key, node["_target_"], allow)
    return functools.partial(target, **arguments(node)) if node.get("_partial_") else target(**arguments(node))
