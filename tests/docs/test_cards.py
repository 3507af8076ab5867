"""Each callback comes with a card and a config."""

import ast
from pathlib import Path

from support.cli import ROOT
from support.sources import trees

BASES = ("Callback", "Logger", "SendingLogger")
OF_LOGGERS = [ROOT / "trainer" / "loggers" / f"{name}.py" for name in ("logger", "sender")]


def is_callback(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(ast.unparse(base) in BASES for base in node.bases)


def card(path: Path) -> tuple[str, Path]:
    """Returns the name of the callback in the module `path`, and the place of its card."""
    if path.stem == "callback":  # of a package
        return path.parent.name, path.with_name("README.md")
    return path.stem, path.with_suffix(".md")


def test_every_callback_has_a_card_and_a_config() -> None:
    folders = [ROOT / "trainer" / name for name in ("callbacks", "monitors", "loggers")]
    found = {path: tree for path, tree in trees("trainer").items() if any(map(path.is_relative_to, folders))}
    files = {path: tree for path, tree in found.items() if path not in OF_LOGGERS}
    cards = dict(card(path) for path, tree in files.items() if any(map(is_callback, tree.body)))
    assert cards
    assert {path.stem for path in (ROOT / "conf" / "callbacks").glob("*.yaml")} == cards.keys()
    assert not [name for name, path in cards.items() if not path.exists()]
