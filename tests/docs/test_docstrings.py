"""A function's docstring begins with a verb in the imperative. ruff's D401 takes many a noun and most forms in -s."""

import ast
import re
from collections.abc import Iterator

from support.cli import ROOT
from support.sources import trees


def openers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the first word of each docstring of a function or method. A property is named by a noun."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not (text := ast.get_docstring(node)):
            continue
        if "property" not in map(ast.unparse, node.decorator_list):
            yield node.lineno, re.split(r"[^\w']", text, maxsplit=1)[0]


def bound(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and each name that is given to a variable, an argument, an attribute or a definition."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def found(search, wrong) -> list[str]:
    places = [(path, line, word) for path, tree in trees("trainer").items() for line, word in search(tree)]
    return [f"{path.relative_to(ROOT)}:{line}: {word}" for path, line, word in places if wrong(word)]


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    wrong = found(openers, lambda word: word.endswith("s") and not word.endswith("ss"))
    assert not wrong, "\n".join(wrong)


def test_a_text_for_the_user_is_a_message() -> None:
    assert not found(bound, lambda name: name == "told")


def test_what_is_no_verb_is_found() -> None:
    source = 'def f():\n    """Returns it."""\nasync def g(told):\n    "Rows of it."\n    self.told = told = 1\n'
    assert [word for _, word in openers(ast.parse(source))] == ["Returns", "Rows"]
    assert sorted(name for _, name in bound(ast.parse(source)) if name == "told") == ["told"] * 3
