"""Checks settings against annotations: types, choices and ranges, for the command and for Python. Imports no torch."""

import dataclasses
import difflib
import functools
import inspect
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from math import inf
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Literal, ParamSpec, TypeVar

from trainer.errors import ConfigError, nearest, refuse_empty, refuse_remote
from trainer.other_words import new_name, our_key, our_value

KEPT = (int, float, str, tuple, list, types.NoneType)
TRANSLATED = ("", "trainer.", "data.")  # sections whose keys have other names in other trainers
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Bound:
    """A range of numbers, as in `Annotated[int, AtLeast(1)]`. NaN is in no range."""

    number: float
    words: ClassVar[str]
    holds: ClassVar[Callable[[Any, Any], bool]]


class AtLeast(Bound):
    words, holds = "at least", operator.ge


class AtMost(Bound):
    words, holds = "at most", operator.le


class Above(Bound):
    words, holds = "more than", operator.gt


class Below(Bound):
    words, holds = "less than", operator.lt


@dataclasses.dataclass(frozen=True)
class Local:
    """A non-empty path that can be opened without a library for remote storage."""


class Made:
    """Base class of objects passed as arguments. A config describes one as a node: `_target_` and its arguments."""


PositiveInt = Annotated[int, AtLeast(1), AtMost(2**63 - 1)]
NonNegativeInt = Annotated[int, AtLeast(0), AtMost(2**63 - 1)]
PositiveFloat = Annotated[float, Above(0), Below(inf)]
PositiveOrInfinite = Annotated[float, Above(0)]
NonNegativeFloat = Annotated[float, AtLeast(0), Below(inf)]
LocalPath = Annotated[str, Local()]
Beta = Annotated[NonNegativeFloat, Below(1)]  # the decay of a running mean
Share = Annotated[NonNegativeFloat, AtMost(1)]

# An annotation that is read from source, without an import, may use only these names.
PLAIN = {t.__name__: t for t in (int, float, bool, str, list, tuple, dict, AtLeast, AtMost, Above, Below)}
PLAIN |= {"Literal": Literal, "Annotated": Annotated, "inf": inf}
PLAIN |= {"PositiveInt": PositiveInt, "NonNegativeInt": NonNegativeInt}
PLAIN |= {
    "PositiveFloat": PositiveFloat,
    "PositiveOrInfinite": PositiveOrInfinite,
    "NonNegativeFloat": NonNegativeFloat,
    "Beta": Beta,
    "Share": Share,
}
PLAIN |= {"LocalPath": LocalPath, "Made": Made}


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value fits an annotation: a plain type, a union, Literal, list or tuple of these, a dataclass.

    A whole number fits float. Any value fits an annotation of another kind. Ranges are not checked.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return fits(value, args[0])
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is Literal:
        return any(value is arg or (type(value) is type(arg) and value == arg) for arg in args)
    if origin is tuple and Ellipsis not in args:
        return isinstance(value, list | tuple) and len(value) == len(args) and all(map(fits, value, args))
    if origin in (list, tuple):
        return isinstance(value, (list, origin)) and all(fits(item, args[0]) for item in value)
    if origin is Callable:
        return callable(value)
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    if kind in (None, type(None)):
        return value is None
    if isinstance(kind, type) and issubclass(kind, Made):
        return isinstance(value, kind) or (kind is Made and is_node(value))
    checked = kind in (bool, str, dict, list) or (isinstance(kind, type) and dataclasses.is_dataclass(kind))
    return isinstance(value, kind) if checked else True


def is_node(value: Any) -> bool:
    """Return whether a config value describes an object."""
    return isinstance(value, Mapping) and "_target_" in value


def takes_node(kind: Any) -> bool:
    """Return whether an annotation takes an object that a config describes as a node."""
    return kind is Made or any(map(takes_node, typing.get_args(kind)))


def describe(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return describe(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is Literal:
        return " or ".join(str(arg) for arg in args)
    if origin is tuple and Ellipsis not in args:
        return f"[{', '.join(describe(arg) for arg in args)}]"
    if origin in (list, tuple):
        return "a list" if args[0] is Any else f"a list of {describe(args[0])}"
    if origin is Callable:
        return "a function"
    if kind is Made:
        return "an object ({_target_: package.Class, ...})"
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return f"{kind.__name__}(...)"
    return "null" if kind in (None, type(None)) else getattr(kind, "__name__", str(kind))


def checked(key: str, value: Any, kind: Any, shown: str | None = None) -> Any:
    """Return a value with plain numbers: 1000 for 1e3 where an int is expected, a float for a numpy float.

    Args:
        shown: The value to print in the message, without secrets.

    Raises:
        ConfigError: The value has another type, or is out of range.
    """
    number = plain(value)
    if not fits(number, kind):
        number = plain(native(value))
    if not fits(number, kind):
        whole = isinstance(number, float) and number.is_integer()
        if not (whole and fits(number := int(number), kind)):
            raise misfit(key, value, kind, as_yaml(value) if shown is None else shown)
    refuse_out_of_range(key, number, kind)
    return number


def native(value: Any) -> Any:
    """Convert a mapping or a sequence of another class, such as OmegaConf's, to a dict or a list."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes | list | tuple) else value


def plain(value: Any) -> Any:
    """Convert a number, or a 0-dimensional array or tensor, to an int or a float, also inside a list or a tuple."""
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def misfit(key: str, value: Any, kind: Any, shown: str) -> ConfigError:
    if ours := our_value(key, value):
        return ConfigError(f"{key}={shown}: must be {describe(kind)}; give {ours}")
    choices = [choice for choice in leaves(kind) if isinstance(choice, str)]
    if isinstance(value, list) or (isinstance(value, str) and choices):
        near = difflib.get_close_matches(value, choices, 1, 0.5) if isinstance(value, str) else []
        return ConfigError(f"{key}={shown}: must be {describe(kind)}{f'; did you mean {near[0]}?' if near else ''}")
    if key == "optimizer" and hasattr(value, "param_groups"):
        name = type(value).__name__
        fix = f"give optimizer=lambda groups: {name}(groups, lr=1e-3)"
        return ConfigError(f"optimizer={name}(...): is one of a model that exists, and the run makes its own; {fix}")
    given = f"the class {value.__name__}" if isinstance(value, type) else describe(type(value)).removesuffix("(...)")
    return ConfigError(f"{key}={shown}: must be {describe(kind)}, not {given}")


def called(thing: object, *names: str) -> str:
    """Format an object as the call `Name(key=value)` with these attributes, by default with its arguments.

    An argument is shown if the object has a plain attribute of the same name.
    """
    own = {name: getattr(thing, name, None) for name in names}
    if not names:
        taken = inspect.signature(type(thing)).parameters
        own = {name: value for name, value in vars(thing).items() if name in taken and isinstance(value, KEPT)}
    return f"{type(thing).__name__}({', '.join(f'{name}={value!r}' for name, value in own.items())})"


def leaves(kind: Any) -> tuple[Any, ...]:
    """Return the choices of a Literal, also of one inside a union."""
    args = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return args
    return tuple(leaf for arg in args for leaf in leaves(arg))


def refuse_out_of_range(key: str, value: Any, kind: Any) -> None:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        for bound in args[1:]:
            if isinstance(bound, Bound) and not type(bound).holds(value, bound.number):
                raise ConfigError(f"{key}={value}: must be {bound.words} {bound.number}")
            if isinstance(bound, Local):
                refuse_empty(key, value)
                refuse_remote(key, value)
    elif origin in (typing.Union, types.UnionType):
        refuse_out_of_range(key, value, next(arg for arg in args if fits(value, arg)))
    elif origin in (list, tuple):
        kinds = args if origin is tuple and Ellipsis not in args else [args[0]] * len(value)
        for i, (item, of_item) in enumerate(zip(value, kinds, strict=True)):
            refuse_out_of_range(f"{key}.{i}", item, of_item)


def as_yaml(value: Any) -> str:
    text = " ".join(str(value).split())  # a printed object may have lines
    return {"None": "null", "True": "true", "False": "false"}.get(text, text)


@functools.cache
def kinds_of(target: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the annotations of a function's parameters or a dataclass's fields; none if one can't be resolved."""
    try:
        return typing.get_type_hints(target, include_extras=True)
    except (NameError, AttributeError, TypeError, SyntaxError):  # a name for type checkers alone
        return {}


def check_arguments(prefix: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check each call of a function or a constructor against its annotations. Messages name a key `prefix` + name.

    Raises:
        ConfigError: Raised by the call, as in `checked`.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                bound = inspect.signature(function).bind(*args, **kwargs)
            except TypeError:
                refuse_unknown(function, prefix, len(args), kwargs)
                return function(*args, **kwargs)  # raises Python's own message
            of_names = kinds_of(function)
            for name, value in bound.arguments.items():
                parameter = bound.signature.parameters[name]
                if name in of_names and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                    bound.arguments[name] = checked(prefix + name, value, of_names[name])
            return function(*bound.args, **bound.kwargs)

        return call

    return decorate


def refuse_unknown(function: Callable[..., Any], prefix: str, placed: int, given: Mapping[str, Any]) -> None:
    """Refuse a keyword that a function or a constructor does not have, as the command refuses a key.

    Args:
        placed: The number of positional arguments, which the message does not suggest.

    Raises:
        ConfigError: The message suggests a similar name.
    """
    known = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in (name for name in given if name not in known):
        fix = new_name(prefix + name) or (prefix in TRANSLATED and our_key(name)) or nearest(name, list(known)[placed:])
        raise ConfigError(f"{prefix}{name}={as_yaml(given[name])}: no such key; {fix}")


def check_names(prefix: str) -> Callable[[type[T]], type[T]]:
    """Make the constructor of a dataclass refuse unknown keywords, by `refuse_unknown`."""

    def decorate(kind: type[T]) -> type[T]:
        made: Callable[..., None] = kind.__init__

        @functools.wraps(made)
        def construct(self: T, *args: Any, **kwargs: Any) -> None:
            refuse_unknown(made, prefix, 1 + len(args), kwargs)
            made(self, *args, **kwargs)

        kind.__init__ = construct
        return kind

    return decorate


def check_fields(instance: Any, prefix: str) -> None:
    """Check the fields of a dataclass, as `check_arguments` does. Call it in `__post_init__`."""
    of_names = kinds_of(type(instance))
    for field in dataclasses.fields(instance):
        if field.name in of_names:
            value = checked(prefix + field.name, getattr(instance, field.name), of_names[field.name])
            object.__setattr__(instance, field.name, value)  # it may be frozen
