"""Reads the parameters of constructors from source code."""

import ast
import dataclasses
import functools
import inspect
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from trainer.annotated import PLAIN, kinds_of, takes_node
from trainer.config.targets import locate

NO_DEFAULT = inspect.Parameter.empty
ANY_NAME = "**"  # among the knobs of a function that takes any keyword


@dataclasses.dataclass(frozen=True)
class Knob:
    annotation: Any  # Any if it is not made of plain types
    default: Any = NO_DEFAULT  # a value, or its source; NO_DEFAULT if a value must be given


@functools.cache
def option_parameters(options: type) -> dict[str, Knob]:
    kinds = kinds_of(options)
    return {field.name: Knob(kinds[field.name], field.default) for field in dataclasses.fields(options)}


@functools.cache
def knobs(key: str, target: str, allow: tuple[str, ...]) -> dict[str, Knob]:
    """Return the parameters of a function or of a class's constructor.

    The module's source is parsed if possible, so that checking a config does not import torch.
    """
    module, _, name = target.rpartition(".")
    if source := source_of(module):
        tree = parse(source.read_bytes(), source)
        body = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        found = _read(body[name], body, tree) if name in body else None
        if found is not None:
            return found
        for node in (node for node in tree.body if isinstance(node, ast.ImportFrom)):
            inside = f"{node.module}".startswith(f"{module}.")  # the package exports a name of one of its modules
            if inside and any(alias.name == name for alias in node.names):
                return knobs(key, f"{node.module}.{name}", allow)
    found = locate(f"{key}._target_", target, allow)
    kinds = kinds_of(found.__init__ if isinstance(found, type) else found)
    parameters = inspect.signature(found).parameters.values()
    nodes = {name: kind for name, kind in kinds.items() if takes_node(kind)}
    known = {p.name: Knob(nodes.get(p.name, Any), p.default) for p in parameters}
    return {ANY_NAME if p.kind is p.VAR_KEYWORD else p.name: known[p.name] for p in parameters}


@functools.lru_cache(256)
def parse(content: bytes, source: Path) -> ast.Module:
    return ast.parse(content, source)


@functools.cache
def constant(target: str, name: str) -> Any:
    """Read a class attribute, a literal, from source without an import; None if there is none."""
    module, _, last = target.rpartition(".")
    source = source_of(module)
    tree = parse(source.read_bytes(), source) if source else ast.Module([], [])
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == last for alias in node.names):
            return constant(f"{node.module}.{last}", name)
        for item in node.body if isinstance(node, ast.ClassDef) and node.name == last else ():
            if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == name:
                return ast.literal_eval(item.value)
    return None


def source_of(module: str) -> Path | None:
    """Find a module's file without importing its packages."""
    spec, places = None, None
    for part in module.split("."):
        if spec and not places:  # a module, not a package
            return None
        spec = PathFinder.find_spec(part, places)
        places = spec and spec.submodule_search_locations
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


Definition = ast.ClassDef | ast.FunctionDef


def _read(node: Definition, body: Mapping[str, Definition], tree: ast.Module) -> dict[str, Knob] | None:
    """Return the parameters; None if the constructor is not in this source."""
    if isinstance(node, ast.FunctionDef):
        return _parameters(node.args, tree)
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _parameters(item.args, tree)
    bases = [body.get(ast.unparse(base)) for base in node.bases]
    inherited = [base and _read(base, body, tree) for base in bases]
    if None in inherited:
        return None
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return inherited[0] if inherited else {}
    fields: dict[str, Knob] = {}
    for base in reversed(inherited):
        fields |= base or {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation):
            fields[ast.unparse(item.target)] = Knob(_annotation(item.annotation, tree), item.value or NO_DEFAULT)
    return fields


def _parameters(args: ast.arguments, tree: ast.Module) -> dict[str, Knob]:
    named = [a for a in (*args.posonlyargs, *args.args) if a.arg != "self"]
    defaults = [None] * (len(named) - len(args.defaults)) + list(args.defaults)
    pairs = [*zip(named, defaults, strict=True), *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    known = {a.arg: Knob(_annotation(a.annotation, tree), default or NO_DEFAULT) for a, default in pairs}
    return known | ({ANY_NAME: Knob(Any)} if args.kwarg else {})


def _annotation(node: ast.expr | None, tree: ast.Module) -> Any:
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - PLAIN.keys() if node else ()
    aliases = {name: kind for name in names if (kind := _alias(name, tree)) is not Any}
    try:
        return eval(ast.unparse(node), {"__builtins__": {}}, PLAIN | aliases) if node else Any
    except (NameError, TypeError, AttributeError, SyntaxError):
        return Any


def _alias(name: str, tree: ast.Module) -> Any:
    """Return the choices that a module, or one of Echelon's that it imports from, names: `NAME = Literal[...]`."""
    for item in tree.body:
        if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == name:
            text = ast.unparse(item.value)
            return _annotation(item.value, ast.Module([], [])) if text.startswith("Literal[") else Any
        if isinstance(item, ast.ImportFrom) and any(alias.name == name for alias in item.names):
            source = source_of(module) if (module := item.module or "").startswith("trainer.") else None
            return _alias(name, parse(source.read_bytes(), source)) if source else Any
    return Any
