"""Builds objects from a checked config."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from trainer.annotated import Made, is_node, takes_node
from trainer.config.schema import knobs, option_parameters
from trainer.config.targets import locate
from trainer.errors import ConfigError

T = TypeVar("T")


def arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name not in ("_target_", "_partial_")}


def build_options(options: type[T], values: Mapping[str, Any]) -> T:
    given = dict(values)
    for name, knob in option_parameters(options).items():
        if dataclasses.is_dataclass(knob.annotation) and name in given:
            given[name] = build_options(knob.annotation, given[name])  # pyright: ignore[reportArgumentType] it is a type
    return options(**given)


def build(key: str, node: Mapping[str, Any], allow: tuple[str, ...]) -> Any:
    """Build the object that `node` describes; with `_partial_`, a function that still needs its first arguments.

    An argument that the class lists in its `targets` is replaced with the class that it names. A nested node is built
    if the argument's annotation includes `Made`.
    """
    target, given = locate(f"{key}._target_", node["_target_"], allow), arguments(node)
    for name in [name for name, value in given.items() if is_node(value)]:
        if takes_node(getattr(knobs(key, node["_target_"], allow).get(name), "annotation", None)):
            given[name] = build_made(key, name, given[name], allow)
    for name in getattr(target, "targets", ()):
        if isinstance(given.get(name), str):
            given[name] = locate(f"{key}.{name}", given[name], allow)
    return functools.partial(target, **given) if node.get("_partial_") else target(**given)


def build_made(key: str, name: str, node: Mapping[str, Any], allow: tuple[str, ...]) -> Any:
    kind = locate(f"{key}.{name}._target_", node["_target_"], allow)
    if not (isinstance(kind, type) and issubclass(kind, Made)):
        at = f"{key}.{name}"
        raise ConfigError(f"{at}._target_={node['_target_']}: is no class that {at} takes; see its card")
    try:
        return build(f"{key}.{name}", node, allow)
    except ConfigError as error:  # a constructor knows its own name alone
        text = str(error)
        raise ConfigError(f"{key}.{text}" if text.startswith(f"{name}.") else text) from None
