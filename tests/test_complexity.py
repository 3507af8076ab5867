"""The limits on functions that ruff's C901 (branches) and PLR0913 (arguments) do not have."""

import ast
from functools import cache

from support.cli import ROOT
from support.sources import trees

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def functions() -> list[tuple[str, Function]]:
    """All functions by place. Not parsed as tests are collected, which each worker does."""
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node)
        for folder in ("trainer", "recipes", "echelon", "scripts")
        for path, tree in trees(folder).items()
        for node in ast.walk(tree)
        if isinstance(node, Function)
    ]


def test_functions_are_short() -> None:
    lines = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in functions()}
    assert not [f"{name}: {n} lines" for name, n in lines.items() if n > 45]


def test_the_step_is_on_one_screen() -> None:
    steps = [node for _, node in functions() if node.name == "_train_step"]
    assert len(steps) == 1
    assert len(ast.unparse(steps[0].body).splitlines()) <= 15  # without comments; a long line may be cut in two


def test_the_trainer_has_few_flat_modules() -> None:
    assert len(list((ROOT / "trainer").glob("[!_]*.py"))) <= 25
