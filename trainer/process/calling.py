"""Builds the commands that messages print: how this installation of Echelon is called."""

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]  # the folder that contains the package `trainer`


def echelon() -> list[str]:
    """Return the words that call Echelon: the script next to this interpreter, or `python -m`.

    In a checkout's own folder, `python -m` imports that checkout; the script may belong to another one.
    """
    script = Path(os.path.dirname(sys.executable), "echelon")
    if Path.cwd() == ROOT or not os.access(script, os.X_OK):
        return [this_python(), "-m", "trainer.main"]
    return [shortest(script, "echelon")]


def this_python() -> str:
    return shortest(Path(sys.executable), "python")


def shortest(path: Path, name: str) -> str:
    """Return `name` if the shell finds this file by it, else a path. Links out of the environment are not followed."""
    own = Path(os.path.realpath(path.parent), path.name)
    if own.is_relative_to(here := Path.cwd()):
        return os.path.join(".", own.name) if own.parent == here else str(own.relative_to(here))
    found = shutil.which(name) or ""
    same = os.path.realpath(os.path.dirname(found)) == str(own.parent) and os.path.samefile(found, own)
    return name if same else str(path)
