"""The parsed sources of Echelon: once per process, for the tests that read them."""

import ast
import gc
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
