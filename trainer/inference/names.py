"""Names callbacks that are given as a list."""

from collections.abc import Iterable, Mapping

from trainer.callback import Callback, name_of_class
from trainer.checks.callback import refuse_no_callback
from trainer.errors import ConfigError
from trainer.loggers.progress.callback import Progress
from trainer.process.notebook import shown_in_notebook


def by_name(callbacks: Mapping[str, Callback] | Iterable[Callback] | None) -> Mapping[str, Callback]:
    """Return callbacks by name; those in a list are named after their class. In a notebook, `progress` is added."""
    if isinstance(callbacks, Mapping):
        return callbacks  # pyright: ignore[reportReturnType] no mapping has callbacks as its keys
    callbacks = [] if callbacks is None else callbacks
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, str):
        fix = "give a list, as [EMA()], or a dict of name -> callback"
        raise ConfigError(f"callbacks: is a value of type {type(callbacks).__name__}; {fix}")
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
    return {"progress": Progress(), **named} if shown_in_notebook() else named
