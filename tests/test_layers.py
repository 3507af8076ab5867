"""Imports, type-only and local ones too: none goes up in the table of docs/design.md, none in a circle."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from support.cli import ROOT
from support.sources import imported, trees

from trainer.callback import HOOKS

PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("trainer", "recipes", "echelon")
    for path in (ROOT / folder).rglob("*.py")
    if path != ROOT / "trainer" / "__init__.py"  # has the version, and the name `Trainer`
}


def tree_of(path: Path) -> ast.Module:
    return trees(path.relative_to(ROOT).parts[0])[path]


@cache
def imports() -> dict[str, set[str]]:
    """Return the modules of ours that each module imports. Not at import: every worker collects this file."""
    return {name: imported(ast.walk(tree_of(path)), PATHS) for name, path in PATHS.items()}


def arrows() -> list[tuple[str, str]]:
    return [(name, other) for name, others in imports().items() for other in others]


ROWS = re.findall(r"^\| (\d+) \| ([^|]+) \|", (ROOT / "docs" / "design.md").read_text(), flags=re.MULTILINE)
LAYERS = [(name, int(number)) for number, names in ROWS for name in re.findall(r"`([\w.]+)`", names)]


SPLIT = {name.split(".")[0] for name, _ in LAYERS if "." in name}  # packages whose modules stand in several layers


def place(module: str) -> str:
    """Returns the name that the table has for a module: its package, its own, or both in a package that is split."""
    names = module.removeprefix("trainer.").split(".")
    return ".".join(names[: 1 + (names[0] in SPLIT)])


def test_the_table_names_each_module_once() -> None:
    assert sorted(name for name, _ in LAYERS) == sorted({place(module) for module in PATHS} - SPLIT)


def test_no_import_goes_up() -> None:
    layer = dict(LAYERS)
    assert not [f"{one} imports {other}" for one, other in arrows() if layer[place(other)] > layer[place(one)]]


def test_no_imports_go_in_a_circle() -> None:
    TopologicalSorter(imports()).prepare()  # a CycleError names the circle


def test_no_callback_imports_another() -> None:
    callbacks = [(one.split("."), other.split(".")) for one, other in arrows()]
    pairs = [(one[2], other[2]) for one, other in callbacks if one[1:2] == other[1:2] == ["callbacks"]]
    assert not [f"{one} imports {other}" for one, other in pairs if one != other]


def test_pyright_sees_what_callbacks_take_from_the_trainer() -> None:
    """A hook has its types from `Callback`; another function needs one of its own."""
    untyped = [
        f"{name}: {node.name}"
        for name, path in PATHS.items()
        if name.startswith(("trainer.callbacks", "trainer.monitors", "trainer.loggers"))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef) and node.name not in HOOKS
        for argument in node.args.args
        if argument.arg == "trainer" and argument.annotation is None
    ]
    assert not untyped
