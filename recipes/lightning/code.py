"""Reads the code of a module's hooks, before any of them runs."""

import dis
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any


def logger_uses(module: Any, methods: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield a method and the attribute that it takes from `self.logger`.

    Methods of the module that these call are read, too. A method that also uses `self.logger` as a value is left out,
    since it may look whether there is one.
    """
    kind, ahead, seen = type(module), list(methods), set(methods)
    while ahead:
        name = ahead.pop()
        method = vars(module).get(name, getattr(kind, name, None))
        code = getattr(getattr(method, "func", method), "__code__", None)
        if code is None or code.co_filename == base_file(kind):
            continue
        parts = [*codes_in(code)]
        used = [after for part in parts for after in after_logger(part)]
        if used and None not in used:
            yield name, str(used[0])
        names = {name for part in parts for name in part.co_names}
        called = {other for other in names if callable(vars(module).get(other, getattr(kind, other, None)))}
        called -= seen
        ahead += called
        seen |= called


def base_file(kind: type) -> str:
    """Return the file of LightningModule itself, whose methods know what to do without a logger."""
    base = next((each for each in kind.__mro__ if each.__name__ == "LightningModule"), object)
    return next((f.__code__.co_filename for f in vars(base).values() if hasattr(f, "__code__")), "")


def codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from codes_in(value)


def after_logger(code: CodeType) -> Iterator[Any]:
    """Yield the name of the attribute that follows each `self.logger` or `trainer.logger`; None if none follows."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    for before, step, after in zip(steps, steps[1:], steps[2:], strict=False):
        if step.argval == "logger" and step.opname == "LOAD_ATTR" and before.argval in ("self", "trainer"):
            yield after.argval if after.opname in ("LOAD_ATTR", "LOAD_METHOD") else None
