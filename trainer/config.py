"""From a composed config to objects. Checked first against the constructors' signatures, read from source, not imported."""

import ast
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from trainer.errors import ConfigError
from trainer.options import DataOptions, Options

ALLOWED = ("trainer", "recipes", "torch.nn", "torch.optim", "transformers")
TOP = {"recipe", "callbacks", "optimizer", "schedule", "batch", "micro_batch", "accumulate", "trainer", "data"}
NO_DEFAULT = inspect.Parameter.empty


@dataclasses.dataclass(frozen=True)
class Knob:
    annotation: Any  # Any where it is not one of the plain types
    default: Any  # NO_DEFAULT where it must be given


def check(config: Mapping[str, Any]) -> None:
    """Every key known, every value of its type, nothing missing.

    Raises:
        ConfigError: for the first that is not.
    """
    for key in config:
        if key not in TOP:
            raise ConfigError(unknown(key, key, TOP))
    refuse_missing(config, "")
    for key, kind in (("batch", int), ("micro_batch", int | None), ("accumulate", int | None)):
        check_type(key, config.get(key), kind)
    check_section("trainer", config["trainer"], options_knobs(Options))
    check_section("data", config["data"], options_knobs(DataOptions))
    allow = (*ALLOWED, *config["trainer"]["allow_targets"])
    for key in ("recipe", "optimizer", "schedule"):
        check_node(key, config[key], allow)
    for name, node in config["callbacks"].items():
        check_node(f"callbacks.{name}", node, allow)


def refuse_missing(node: Any, key: str) -> None:
    if node == "???":
        raise ConfigError(f"{key}=???: has no default; give {key}=VALUE")
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        refuse_missing(value, f"{key}.{name}".lstrip("."))


def check_node(key: str, node: Any, allow: Iterable[str]) -> None:
    """One `_target_` with its arguments."""
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigError(f"{key}={node}: has no _target_; choose one by {key.split('.')[0]}=NAME")
    refuse_target(key, node["_target_"], node["_target_"], allow)
    check_section(key, {k: v for k, v in node.items() if k not in ("_target_", "_partial_")}, knobs(node["_target_"]))
    if not node.get("_partial_"):
        for name, knob in knobs(node["_target_"]).items():
            if knob.default is NO_DEFAULT and name not in node:
                raise ConfigError(f"{key}.{name}: is missing; give {key}.{name}=VALUE")


def refuse_target(key: str, target: str, module: str, allow: Iterable[str]) -> None:
    if not any(f"{module}.".startswith(f"{package}.") for package in allow):
        raise ConfigError(
            f"{key}._target_={target}: {module.split('.')[0]} is not a package that configs may name; "
            f"if you trust it, trainer.allow_targets=[{module.split('.')[0]}]"
        )


def check_section(key: str, values: Mapping[str, Any], known: Mapping[str, Knob]) -> None:
    for name, value in values.items():
        if name not in known:
            raise ConfigError(unknown(f"{key}.{name}", name, known))
        annotation = known[name].annotation
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            check_type(f"{key}.{name}", value, dict)
            check_section(f"{key}.{name}", value, options_knobs(annotation))
        else:
            check_type(f"{key}.{name}", value, annotation)


def unknown(key: str, name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, 3, 0.5)
    return f"{key}: no such key; " + (f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}")


def check_type(key: str, value: Any, annotation: Any) -> None:
    if not fits(value, annotation):
        raise ConfigError(f"{key}={value}: must be {describe(annotation)}, not {type(value).__name__}")


def fits(value: Any, annotation: Any) -> bool:
    """Plain types, unions, Literal, list and tuple of them; whole numbers are floats too. Anything else fits."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin in (list, tuple):
        return isinstance(value, list) and all(fits(item, args[0]) for item in value)
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation is None or annotation is type(None):
        return value is None
    return isinstance(value, annotation) if annotation in (bool, str, dict, list) else True


def describe(annotation: Any) -> str:
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if typing.get_origin(annotation) is Literal:
        return " or ".join(str(arg) for arg in args)
    if typing.get_origin(annotation) in (list, tuple):
        return f"a list of {describe(args[0])}"
    return "null" if annotation in (None, type(None)) else getattr(annotation, "__name__", str(annotation))


def options_knobs(options: type) -> dict[str, Knob]:
    hints = typing.get_type_hints(options)
    return {field.name: Knob(hints[field.name], field.default) for field in dataclasses.fields(options)}


@functools.cache
def knobs(target: str) -> dict[str, Knob]:
    """The parameters of a class's constructor or of a function: from its module's source if it is defined there, so that checking a
    config imports no torch; else from the object itself."""
    module, _, name = target.rpartition(".")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec and spec.origin and spec.origin.endswith(".py"):
        body = {
            n.name: n
            for n in ast.parse(Path(spec.origin).read_text()).body
            if isinstance(n, ast.ClassDef | ast.FunctionDef)
        }
        if name in body:
            return _read(body[name], body)
    parameters = inspect.signature(locate(target)).parameters
    return {name: Knob(Any, parameter.default) for name, parameter in parameters.items()}


def _read(node: ast.ClassDef | ast.FunctionDef, body: Mapping[str, ast.ClassDef | ast.FunctionDef]) -> dict[str, Knob]:
    if isinstance(node, ast.ClassDef):
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                return _read(item, body)
        fields: dict[str, Knob] = {}  # of a dataclass, its bases' first
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in body:
                fields |= _read(body[base.id], body)
        own = [item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
        return fields | {ast.unparse(item.target): Knob(_annotation(item.annotation), item.value) for item in own}
    arguments = [a for a in (*node.args.posonlyargs, *node.args.args) if a.arg != "self"]
    defaults = [NO_DEFAULT] * (len(arguments) - len(node.args.defaults)) + list(node.args.defaults)
    pairs = [*zip(arguments, defaults, strict=True), *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    return {a.arg: Knob(_annotation(a.annotation), NO_DEFAULT if default is None else default) for a, default in pairs}


def _annotation(node: ast.expr | None) -> Any:
    """The type, where it is made of plain ones; else Any."""
    if node is None:
        return Any
    plain = {
        "int": int,
        "float": float,
        "bool": bool,
        "str": str,
        "list": list,
        "tuple": tuple,
        "dict": dict,
        "Literal": Literal,
    }
    try:
        return eval(ast.unparse(node), {"__builtins__": {}}, plain)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return Any


def locate(target: str) -> Any:
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, ValueError, AttributeError) as error:
        raise ConfigError(f"_target_={target}: {error}; name an importable class or function") from None


def build(key: str, node: Mapping[str, Any], allow: Iterable[str]) -> Any:
    """The object that `node` describes, or with `_partial_` a function that still takes its first arguments.

    The allowed packages are checked on the object itself: a name that leads elsewhere through a module's imports is refused.
    """
    target: Callable[..., Any] = locate(node["_target_"])
    refuse_target(key, node["_target_"], getattr(target, "__module__", None) or "builtins", allow)
    arguments = {k: v for k, v in node.items() if k not in ("_target_", "_partial_")}
    return functools.partial(target, **arguments) if node.get("_partial_") else target(**arguments)
