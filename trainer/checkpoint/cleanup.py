"""Deletes what killed processes left in a run's folder, and restores checkpoints. Standard library only."""

import errno
import json
import math
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from trainer.checkpoint.manifest import MANIFEST

# Echelon's own folders, with the number of their attempt; see commit.py. No other file is deleted.
STAGED = re.compile(r"\.tmp-\d{8,}-([0-9a-f]+)")
REPLACED = re.compile(r"\.old-(step-\d{8,})-([0-9a-f]+)")
TRASH = re.compile(r"\.trash-step-\d{8,}-[0-9a-f]+")


def sweep(run_dir: Path, attempt: int) -> None:
    """Delete trash, and the leftovers of attempts up to this one, because a later attempt may still be running."""
    put_back(run_dir, attempt)
    for old in _left(run_dir, REPLACED, attempt):
        with suppress(OSError):  # can't be read now; the next sweep tries again
            kind, step = ".abandoned" if others_in(old) else ".trash", old.name.split("-", 1)[1].rpartition("-")[0]
            os.rename(old, run_dir / f"{kind}-{step}-{os.urandom(4).hex()}")
    trash = [path for path in run_dir.glob(".trash-*") if TRASH.fullmatch(path.name)]
    for path in (*_left(run_dir, STAGED, attempt), *trash):
        shutil.rmtree(path, ignore_errors=True)


def others_in(checkpoint: Path) -> list[str]:
    """Return the files that the manifest does not name: all if it is damaged, none if deletion had begun."""
    try:
        named = set(json.loads((checkpoint / MANIFEST).read_bytes())["files"])
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, RecursionError):
        named = set()
    return sorted(set(os.listdir(checkpoint)) - {MANIFEST, *named})


def put_back(run_dir: Path, attempt: float = math.inf) -> None:
    """Restore a checkpoint that a killed process was about to replace."""
    for old in _left(run_dir, REPLACED, attempt):
        final = old.with_name(old.name.removeprefix(".old-").rpartition("-")[0])
        if not os.path.lexists(final):
            with suppress(OSError):  # another reader was faster, or this one has no write permission
                os.rename(old, final)


def move(folder: Path, to: Path) -> None:
    """Rename a folder, or copy it if it is in an overlay's lower layer, where renaming fails."""
    try:
        os.rename(folder, to)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copytree(folder, to, symlinks=True)
        shutil.rmtree(folder)


def delete(folder: Path, hidden: Path) -> None:
    """Delete a folder under a hidden name, so that no reader sees half of it.

    A folder in an overlay's lower layer can't be renamed, so it is deleted under its own name.
    """
    try:
        os.rename(folder, hidden)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        hidden = folder
    shutil.rmtree(hidden, ignore_errors=True)


def _left(run_dir: Path, kind: re.Pattern[str], attempt: float) -> list[Path]:
    found = {path: kind.fullmatch(path.name) for path in run_dir.glob(".*")}
    numbers = {path: name[kind.groups] for path, name in found.items() if name}
    return [path for path, number in numbers.items() if not number.isdecimal() or int(number) <= attempt]
