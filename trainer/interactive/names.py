"""Names callbacks that a program gives as a list."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.callback import Callback
from trainer.errors import ConfigError

OWN = re.compile(r"trainer\.(?:callbacks|monitors)\.(\w+)")
WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # where a word of a class name begins


def by_name(callbacks: Mapping[str, Callback] | Iterable[Callback] | None) -> Mapping[str, Callback]:
    """Return name -> callback. A callback of a list is named after its class.

    Raises:
        ConfigError: Two callbacks of a list have one name.
    """
    if callbacks is None or isinstance(callbacks, Mapping):
        return callbacks or {}  # pyright: ignore[reportReturnType] no mapping has callbacks as its keys
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, str):
        given = type(callbacks).__name__
        raise ConfigError(
            f"callbacks: is a value of type {given}; give a list, as [EMA()], or a dict of name -> callback"
        )
    named: dict[str, Callback] = {}
    for callback in callbacks:
        if (name := name_of_class(callback)) in named:
            kind = type(callback).__name__
            raise ConfigError(
                f"callbacks: two are of class {kind}, so both would be named {name}; leave one out, or give names, as "
                f"{{'a': {kind}(...), 'b': {kind}(...)}}"
            )
        named[name] = callback
    return named


def name_of_class(callback: Any) -> str:
    """Return the name of Echelon's own callback in the config; another class's name in snake_case."""
    kind = callback if isinstance(callback, type) else type(callback)
    own = OWN.match(kind.__module__)
    return own[1] if own else WORD.sub("_", kind.__name__).lower()
