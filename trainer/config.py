"""From a composed config to objects, checked first against the constructors' signatures as their source has them."""

import ast
import dataclasses
import functools
import importlib.util
import inspect
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from trainer.errors import ConfigError, nearest, require
from trainer.nccl import NCCLOptions
from trainer.options import DataOptions, Options
from trainer.secret import HIDDEN, secrets, without_secrets
from trainer.targets import ALLOWED, locate, refuse_nested, refuse_target

TOP = ("recipe", "callbacks", "optimizer", "schedule", "batch", "micro_batch", "accumulate", "trainer", "data", "nccl")
STAGES = {"decoders": ("extension", "bytes"), "map": ("sample",)}  # of `data`: functions, and what they are called with
NO_DEFAULT = inspect.Parameter.empty
ANY_NAME = "**"  # among the knobs of what takes any keyword
PLAIN = {t.__name__: t for t in (int, float, bool, str, list, tuple, dict)} | {"Literal": Literal}

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Knob:
    annotation: Any  # Any where it is not made of plain types
    default: Any = NO_DEFAULT  # a value, or its source; NO_DEFAULT where it must be given


def check(config: Mapping[str, Any]) -> None:
    """Every key known, every value of its type and in its range, nothing missing.

    Raises:
        ConfigError: for the first that is not.
    """
    if hidden := secrets(config):
        raise ConfigError(f"{hidden[0]}={HIDDEN}: is a secret that was not printed; give its value")
    for key in config:
        if key not in TOP:
            raise ConfigError(f"{key}={shown(key, config[key])}: no such key; {nearest(key, TOP)}")
    for key in TOP:
        if key not in config:
            raise ConfigError(f"{key}: is missing; a run can't be without it")
    refuse_missing(config, "")
    for key in ("batch", "micro_batch", "accumulate"):
        check_type(key, config[key], int if key == "batch" else int | None)
        require(key, config[key], at_least=1)
    check_type("callbacks", config["callbacks"], dict)
    for key, options in (("trainer", Options), ("data", DataOptions), ("nccl", NCCLOptions)):
        check_values(key, config[key], options_knobs(options))
        settings(options, config[key])  # refuses what is out of range
    allow = (*ALLOWED, *config["trainer"].get("allow_targets", ()))
    for name, node in config["callbacks"].items():
        if not isinstance(node, Mapping) or "_target_" not in node:
            others = ", ".join(sorted(config["callbacks"].keys() - {name}))
            raise ConfigError(f"callbacks.{name}: not in this run, which has {others}; '+callbacks=[{name}]' adds it")
        check_node(f"callbacks.{name}", node, allow)
    check_stages(config["data"], allow)
    for key in ("recipe", "optimizer", "schedule"):
        check_node(key, config[key], allow)
    build("schedule", config["schedule"], allow)  # refuses what is out of range, and imports no torch


def refuse_missing(node: Any, key: str) -> None:
    if node == "???":
        raise ConfigError(f"{key}=???: has no default; give {key}=VALUE")
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        refuse_missing(value, f"{key}.{name}".lstrip("."))


def check_node(key: str, node: Any, allow: tuple[str, ...]) -> None:
    """One `_target_` with its arguments."""
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigError(f"{key}={shown(key, node)}: has no _target_; choose one by {key}=NAME, see --help")
    target = node["_target_"]
    check_type(f"{key}._target_", target, str)
    if "." not in target:
        raise ConfigError(f"{key}._target_={target}: not a full name; write package.module.Name")
    refuse_target(key, target, target, allow)
    known = knobs(key, target, allow)
    refuse_nested(key, arguments(node))
    check_values(key, arguments(node), known)
    for name, knob in known.items():
        if knob.default is NO_DEFAULT and name not in node and name != ANY_NAME and not node.get("_partial_"):
            raise ConfigError(f"{key}.{name}: is missing; give {key}.{name}=VALUE")


def check_stages(data: Mapping[str, Any], allow: tuple[str, ...]) -> None:
    for key in STAGES:
        for i, item in enumerate(data.get(key, ())):
            check_node(f"data.{key}.{i}", stage_node(f"data.{key}.{i}", item), allow)


def stage_node(key: str, item: Any) -> Mapping[str, Any]:
    """A name is the function itself, which gets no arguments before it is called."""
    if isinstance(item, str):
        return {"_target_": item, "_partial_": True}
    if not isinstance(item, Mapping) or "_target_" not in item:
        raise ConfigError(f"{key}={shown(key, item)}: must be the name of a function, or a _target_ with its arguments")
    return item


def check_values(key: str, values: Any, known: Mapping[str, Knob]) -> None:
    check_type(key, values, dict)
    for name, value in values.items():
        if name not in known and ANY_NAME not in known:
            raise ConfigError(f"{key}.{name}={shown(name, value)}: no such key; {nearest(name, known)}")
        kind = known[name].annotation if name in known else Any
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            check_values(f"{key}.{name}", value, options_knobs(kind))
        else:
            check_type(f"{key}.{name}", value, kind)


def check_type(key: str, value: Any, kind: Any) -> None:
    if not fits(value, kind):
        typed = not isinstance(value, list) and not (isinstance(value, str) and "Literal" in str(kind))
        but = f", not {describe(type(value))}" if typed else ""  # else its type is not what is wrong
        raise ConfigError(f"{key}={shown(key, value)}: must be {describe(kind)}{but}")


def shown(key: str, value: Any) -> str:
    """As YAML has it."""
    text = str(without_secrets({key: value})[key])
    return {"None": "null", "True": "true", "False": "false"}.get(text, text)


def fits(value: Any, kind: Any) -> bool:
    """Plain types, unions, Literal, list and tuple of them; whole numbers are floats too. Anything else fits."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is Literal:
        return any(value is arg or (type(value) is type(arg) and value == arg) for arg in args)
    if origin is tuple and Ellipsis not in args:
        return isinstance(value, list) and len(value) == len(args) and all(map(fits, value, args))
    if origin in (list, tuple):
        return isinstance(value, list) and all(fits(item, args[0]) for item in value)
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    if kind in (None, type(None)):
        return value is None
    return isinstance(value, kind) if kind in (bool, str, dict, list) else True


def describe(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is Literal:
        return " or ".join(str(arg) for arg in args)
    if origin is tuple and Ellipsis not in args:
        return f"[{', '.join(describe(arg) for arg in args)}]"
    if origin in (list, tuple):
        return "a list" if args[0] is Any else f"a list of {describe(args[0])}"
    return "null" if kind in (None, type(None)) else getattr(kind, "__name__", str(kind))


def options_knobs(options: type) -> dict[str, Knob]:
    hints = typing.get_type_hints(options)
    return {field.name: Knob(hints[field.name], field.default) for field in dataclasses.fields(options)}


@functools.cache
def knobs(key: str, target: str, allow: tuple[str, ...]) -> dict[str, Knob]:
    """The parameters of a class's constructor or of a function: from its module's source if that tells them, so that
    checking a config imports no torch; else from the object itself."""
    module, _, name = target.rpartition(".")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec and spec.origin and spec.origin.endswith(".py"):
        tree = ast.parse(Path(spec.origin).read_text())
        body = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        found = _read(body[name], body) if name in body else None
        if found is not None:
            return found
    parameters = inspect.signature(locate(key, target, allow)).parameters.values()
    return {ANY_NAME if p.kind is p.VAR_KEYWORD else p.name: Knob(Any, p.default) for p in parameters}


Definition = ast.ClassDef | ast.FunctionDef


def _read(node: Definition, body: Mapping[str, Definition]) -> dict[str, Knob] | None:
    """None where the constructor is not in this source."""
    if isinstance(node, ast.FunctionDef):
        return _parameters(node.args)
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _parameters(item.args)
    bases = [body.get(ast.unparse(base)) for base in node.bases]
    inherited = [base and _read(base, body) for base in bases]
    if None in inherited:
        return None
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return inherited[0] if inherited else {}
    fields: dict[str, Knob] = {}
    for base in reversed(inherited):
        fields |= base or {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation):
            fields[ast.unparse(item.target)] = Knob(_annotation(item.annotation), item.value or NO_DEFAULT)
    return fields


def _parameters(args: ast.arguments) -> dict[str, Knob]:
    named = [a for a in (*args.posonlyargs, *args.args) if a.arg != "self"]
    defaults = [None] * (len(named) - len(args.defaults)) + list(args.defaults)
    pairs = [*zip(named, defaults, strict=True), *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    known = {a.arg: Knob(_annotation(a.annotation), default or NO_DEFAULT) for a, default in pairs}
    return known | ({ANY_NAME: Knob(Any)} if args.kwarg else {})


def _annotation(node: ast.expr | None) -> Any:
    """The type, where it is made of plain ones; else Any."""
    try:
        return eval(ast.unparse(node), {"__builtins__": {}}, PLAIN) if node else Any
    except (NameError, TypeError, AttributeError, SyntaxError):
        return Any


def arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name not in ("_target_", "_partial_")}


def settings(options: type[T], values: Mapping[str, Any]) -> T:
    """The dataclass `options` from its section; one inside of it likewise."""
    given = dict(values)
    for name, knob in options_knobs(options).items():
        if dataclasses.is_dataclass(knob.annotation) and name in given:
            given[name] = settings(knob.annotation, given[name])  # pyright: ignore[reportArgumentType] it is a type
    return options(**given)


def build(key: str, node: Mapping[str, Any], allow: tuple[str, ...]) -> Any:
    """The object that `node` describes, or with `_partial_` a function that still takes its first arguments."""
    target = locate(key, node["_target_"], allow)
    return functools.partial(target, **arguments(node)) if node.get("_partial_") else target(**arguments(node))
