"""All waits stand in one table, trainer/timeouts.py: a second one of the same name might mean something else."""

import ast

import pytest
from support.cli import ROOT
from support.sources import trees

TABLE = ROOT / "trainer" / "timeouts.py"
WAITS = {"sleep", "wait", "join", "poll", "communicate", "select"}
POLL_S = 0.1  # as timeouts.py says: so short a pause is no wait


def number(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Constant) and type(each.value) in (int, float) for each in ast.walk(node))


def constants(tree: ast.Module) -> list[str]:
    """Return the names of constants of seconds, of the module and of its classes."""
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    found = []
    for node in (node for body in bodies for node in body if isinstance(node, ast.Assign | ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        found += [name for name in names if name.endswith("_S") and node.value and number(node.value)]
    return found


def waits(tree: ast.Module) -> list[str]:
    """Return the calls that wait for a number of seconds that stands there."""
    found = []
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = [arg for arg in node.args if name in WAITS] + [k.value for k in node.keywords if k.arg == "timeout"]
        values = [arg.value for arg in given if isinstance(arg, ast.Constant)]
        found += [ast.unparse(node) for value in values if type(value) in (int, float) and value > POLL_S]
    return found


def test_no_other_module_has_a_wait_of_its_own():
    modules = trees("trainer")
    assert TABLE in modules
    for path, tree in modules.items():
        assert path == TABLE or not constants(tree) + waits(tree), path


@pytest.mark.parametrize(
    "code", ["A_S = 3.0", "A_S, B_S = 1.0, 2", "class C:\n    A_S: float = 2 * 3", "A_S = (0.5, 1.0)", "sleep(0.2)",
             "run([], timeout=5)", "thread.join(3)"],
)  # fmt: skip
def test_a_wait_is_found(code: str):
    tree = ast.parse(code)
    assert constants(tree) + waits(tree)


@pytest.mark.parametrize("code", ["A_S = B_S", "STEPS = 3", "sleep(0.05)", "wait(timeout_s)", "NAMES_S = 'a'"])
def test_no_wait_is_found_where_none_is(code: str):
    tree = ast.parse(code)
    assert constants(tree) + waits(tree) == []
