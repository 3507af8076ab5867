"""The limits that keep the code readable (modules, functions, constructors), and what every callback comes with."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("trainer", "recipes") for path in (ROOT / folder).rglob("*.py"))
SCRIPTS = sorted(path for folder in ("tests", "scripts") for path in (ROOT / folder).rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in SOURCES}
FUNCTIONS = [
    (f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node)
    for path, tree in TREES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
]


def limit(path: Path) -> int:
    if path == ROOT / "trainer" / "trainer.py":
        return 300
    return 150 if path.parent == ROOT / "trainer" / "callbacks" else 250


def test_modules_are_short() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in SOURCES}
    assert not [f"{path.relative_to(ROOT)}: {n} lines" for path, n in lines.items() if n > limit(path)]


def test_functions_are_short() -> None:
    lines = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in FUNCTIONS}
    assert not [f"{name}: {n} lines" for name, n in lines.items() if n > 40]


def test_constructors_take_at_most_12_arguments() -> None:
    constructors = {name: node.args for name, node in FUNCTIONS if node.name == "__init__"}
    assert constructors
    count = {name: len(a.posonlyargs + a.args + a.kwonlyargs) - 1 for name, a in constructors.items()}  # less self
    assert not [f"{name}: {n} arguments" for name, n in count.items() if n > 12]


def test_modules_begin_with_a_docstring() -> None:
    trees = {path: tree for path, tree in TREES.items() if tree.body}  # an empty __init__.py needs none
    trees |= {path: ast.parse(path.read_text()) for path in SCRIPTS}
    assert not [str(path.relative_to(ROOT)) for path, tree in trees.items() if not ast.get_docstring(tree)]


def test_every_callback_has_a_card_and_a_config() -> None:
    folder = ROOT / "trainer" / "callbacks"
    modules = {path.stem for path in folder.glob("[!_]*.py")}
    assert modules
    assert {path.stem for path in folder.glob("*.md")} == modules
    assert {path.stem for path in (ROOT / "conf" / "callbacks").glob("*.yaml")} == modules
