"""The limits on functions that ruff's C901 (branches) and PLR0913 (arguments) do not have."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FUNCTIONS = [
    (f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node)
    for folder in ("trainer", "recipes", "echelon", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
]


def test_functions_are_short() -> None:
    lines = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in FUNCTIONS}
    assert not [f"{name}: {n} lines" for name, n in lines.items() if n > 45]


def test_the_step_is_on_one_screen() -> None:
    steps = [node for _, node in FUNCTIONS if node.name == "_train_step"]
    assert len(steps) == 1
    assert len(ast.unparse(steps[0].body).splitlines()) <= 15  # without comments; a long line may be cut in two


def test_the_trainer_has_few_flat_modules() -> None:
    assert len(list((ROOT / "trainer").glob("[!_]*.py"))) <= 20
