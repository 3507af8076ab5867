"""Calls of Python's standard library in Criteo's format: which function does a function call next?

Each call in the running interpreter's library, without tests, is a positive row. The candidate is the called name. With
it come three negatives, which are sampled: names of other calls of the same day. So frequent names are as frequent
among negatives, and mean nothing. A day is a tenth of each file, in its order: day 0 has the beginnings of all files.

| field | content |
|---|---|
| I1, I2 | calls of the candidate before this one, in this file and in this function |
| I3 | calls since the file's last one of the candidate; empty without |
| I4 | calls of the candidate on earlier days, in all files |
| I5, I6, I7 | calls before this one, in this file and in this function; lines since the function began |
| C1 | the candidate |
| C2, C3 | the two calls before, in this function |
| C4, C5, C6, C7 | file, folder, class and function of the call |
| all others | empty |
"""

import ast
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from recipes.cache import build_once, digest, root
from recipes.criteo import CATEGORIES, INTEGERS
from recipes.text import Source

FORMAT = 1  # of the cache; part of the hash
DAYS = 10
NEGATIVES = 3  # of each positive
SEED = 0  # of the negatives


class Call(NamedTuple):
    name: str
    owner: str  # the class
    function: str
    began: int  # line of the function
    line: int


def days(cache: str | None) -> list[Path]:
    """Return the file of each day under `cache`, and write all if they are missing.

    Raises:
        ConfigError: The cache can't be written.
    """
    source = Source(None)
    identity = [FORMAT, sys.version, [(name, stat.st_size) for name, stat in source.stats.items()]]
    folder = root(cache) / f"calls-{digest(identity)}"
    build_once(folder, "calls", Path.exists, lambda partial: _write(source, partial))
    return [folder / f"day_{day}" for day in range(DAYS)]


def _write(source: Source, folder: Path) -> None:
    folder.mkdir()
    calls = {name: calls_of(path.read_bytes()) for name, path in source.files.items()}
    for day, lines in enumerate(rows(calls)):
        (folder / f"day_{day}").write_text("".join(lines))


def calls_of(source: bytes) -> list[Call]:
    """Return the calls of a source file that are in functions and name what they call, in order of their lines."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a file that shows how a mistake looks
        return []
    found: list[tuple[int, int, Call]] = []

    def visit(node: ast.AST, owner: str, function: str, began: int) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, child.name, "", 0)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child, owner, child.name, child.lineno)
            else:
                if isinstance(child, ast.Call) and function and (name := called(child.func)):
                    place = (child.func.end_lineno or 0, child.func.end_col_offset or 0)
                    found.append((*place, Call(name, owner, function, began, child.lineno)))
                visit(child, owner, function, began)

    visit(tree, "", "", 0)
    return [call for *_, call in sorted(found)]


def called(function: ast.expr) -> str:
    """Return the last name of what is called; empty without one."""
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def rows(calls: dict[str, list[Call]]) -> Iterator[list[str]]:
    """Yield the lines of each day."""
    rng = np.random.default_rng(SEED)
    files = {name: _File(name) for name in calls}
    earlier: Counter[str] = Counter()
    for day in range(DAYS):
        own = {name: each[len(each) * day // DAYS : len(each) * (day + 1) // DAYS] for name, each in calls.items()}
        names = [call.name for each in own.values() for call in each]
        lines: list[str] = []
        for file, today in own.items():
            for call in today:
                lines.append(files[file].line(call, call.name, 1, earlier))
                others = (names[i] for i in rng.integers(len(names), size=NEGATIVES))
                lines += [files[file].line(call, name, 0, earlier) for name in others if name != call.name]
                files[file].take(call)
        earlier.update(names)
        yield lines


class _File:
    """The calls of a file before the next one."""

    def __init__(self, name: str) -> None:
        self.name, self.folder = name, os.path.dirname(name)
        self.done, self.inside = 0, 0
        self.counts: Counter[str] = Counter()
        self.counts_inside: Counter[str] = Counter()
        self.last: dict[str, int] = {}
        self.before = ["", ""]
        self.function = ("", 0)

    def _enter(self, call: Call) -> None:
        if self.function != (call.function, call.began):
            self.function = (call.function, call.began)
            self.inside, self.counts_inside, self.before = 0, Counter(), ["", ""]

    def line(self, call: Call, candidate: str, label: int, earlier: Counter[str]) -> str:
        self._enter(call)
        since = self.done - self.last[candidate] if candidate in self.last else ""
        numbers = [self.counts[candidate], self.counts_inside[candidate], since, earlier[candidate]]
        numbers += [self.done, self.inside, call.line - call.began]
        kinds = [candidate, *self.before, self.name, self.folder, call.owner, call.function]
        texts = [f"{zlib.crc32(kind.encode()):08x}" if kind else "" for kind in kinds]
        empty = [""] * (INTEGERS - len(numbers)), [""] * (CATEGORIES - len(kinds))
        return "\t".join([str(label), *map(str, numbers), *empty[0], *texts, *empty[1]]) + "\n"

    def take(self, call: Call) -> None:
        """Add a call to what is known."""
        self.last[call.name] = self.done
        self.done, self.inside = self.done + 1, self.inside + 1
        self.counts[call.name] += 1
        self.counts_inside[call.name] += 1
        self.before = [call.name, self.before[0]]
