"""The parsed sources of Echelon: once per process, for the tests that read them."""

import ast
import gc
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path

from support.cli import ROOT


@cache
def trees(folder: str) -> dict[Path, ast.Module]:
    """By file, of a folder of the checkout. Collections of garbage leave them out, since they are many objects."""
    gc.collect()
    found = {path: ast.parse(path.read_text()) for path in sorted((ROOT / folder).rglob("*.py"))}
    gc.freeze()
    return found


def imported(nodes: Iterable[ast.AST], modules: Collection[str]) -> set[str]:
    """Return those of `modules` that a file imports anywhere. A package counts where a name is taken from it itself."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            both = [(node.module, f"{node.module}.{alias.name}") for alias in node.names]
            names |= {submodule if submodule in modules else str(module) for module, submodule in both}
    return names & set(modules)
