"""Names callbacks that a program gives as a list."""

from collections.abc import Iterable, Mapping

from trainer.callback import Callback, name_of_class
from trainer.callback_checks import refuse_no_callback
from trainer.errors import ConfigError


def by_name(callbacks: Mapping[str, Callback] | Iterable[Callback] | None) -> Mapping[str, Callback]:
    """Return name -> callback. A callback of a list is named after its class.

    Raises:
        ConfigError: An item is no callback, or two have one name.
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
        refuse_no_callback("callbacks", callback)
        if (name := name_of_class(type(callback))) in named:
            kind = type(callback).__name__
            raise ConfigError(
                f"callbacks: two are of class {kind}, so both would be named {name}; leave one out, or give names, as "
                f"{{'a': {kind}(...), 'b': {kind}(...)}}"
            )
        named[name] = callback
    return named
