"""A callback's name stands in its own folder: tools, monitors and lower layers ask callbacks what they do.

Fixes in messages name callbacks for users, and the tables of other trainers' words do. They decide nothing.
"""

import ast
import re
from collections.abc import Iterator

from support.cli import ROOT
from support.sources import trees

OWN = {path.stem for path in (ROOT / "trainer" / "callbacks").iterdir()} - {"__init__", "__pycache__"}
NOUNS = {  # a field of a line, and no callback
    "trainer/data/bad_samples.py": {"shard"},
    "trainer/monitors/comm_monitor.py": {"bucket"},
    "trainer/tools/report/comm.py": {"bucket"},
}
TABLES = ("trainer/config/training_arguments.py",)  # of transformers' words
SPELT = re.compile(rf"callbacks?\.({'|'.join(OWN)})\b|\+callbacks=\[({'|'.join(OWN)})\b")


def spelt(path: str, tree: ast.AST) -> Iterator[str]:
    """Yield the places that decide by a callback's name: a string or an import; in tools and monitors any text."""
    texts = path.startswith(("trainer/tools/", "trainer/monitors/", "trainer/loggers/"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}".startswith("trainer.callbacks."):
            yield f"{path}:{node.lineno} from {node.module}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
            named = node.value in OWN - NOUNS.get(path, set()) or (texts and SPELT.search(node.value))
            if named:
                yield f"{path}:{node.lineno} {node.value[:60]}"


def others() -> dict[str, ast.AST]:
    found = {path.relative_to(ROOT).as_posix(): tree for path, tree in trees("trainer").items()}
    return {path: tree for path, tree in found.items() if not path.startswith("trainer/callbacks/")}


def test_no_tool_no_monitor_and_no_lower_layer_decides_by_a_callbacks_name() -> None:
    assert not [place for path, tree in others().items() if path not in TABLES for place in spelt(path, tree)]


def test_each_exception_is_needed() -> None:
    trees_of = others()
    for path, nouns in NOUNS.items():
        assert nouns <= {node.value for node in ast.walk(trees_of[path]) if isinstance(node, ast.Constant)}
    assert all(list(spelt(path, trees_of[path])) for path in TABLES)
