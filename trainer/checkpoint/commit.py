"""A checkpoint appears whole or not at all: staged, hashed, synced, renamed once. Standard library only.

    <dir>/last.pt                     link to the newest checkpoint
    <dir>/<run>/step-00001200/        a checkpoint; never changed once it has this name
    <dir>/<run>/.tmp-* .trash-*       what a killed process leaves: the next that writes the run deletes it
    <dir>/<run>/.old-*                being replaced by one of the same step: put back if that one didn't arrive
    <dir>/<run>/.bad-* .abandoned-*   damaged, or of a history that a resume has left: kept until someone deletes them
    <dir>/<run>/.lock                 held by the process that writes the run: one at a time
    <dir>/<run>/ATTEMPT               the one that began last, where a lock fails too

A process that was taken for dead, and goes on, commits nothing: see fence.py.
"""

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.cleanup import put_back, sweep
from trainer.checkpoint.fence import Attempt, next_attempt, refuse_superseded
from trainer.checkpoint.locate import (
    LAST,
    folder,
)
from trainer.checkpoint.manifest import seal, sync


def begin(run_dir: Path) -> Attempt:
    """From here on this process writes the run, and none that has begun before. What those have left is deleted: one
    that is stopped in front of its last rename has nothing left to rename."""
    make(run_dir)
    attempt = next_attempt(run_dir)
    sweep(run_dir, attempt.number)
    return attempt


def commit(
    run_dir: Path,
    step: int,
    files: Mapping[str, memoryview],
    manifest: Mapping[str, Any],
    attempt: Attempt | None = None,
    moved: Callable[[], object] = lambda: None,
) -> Path:
    """Makes `files`, by name, the run's checkpoint at `step`, replacing one that is there.

    `manifest` is JSON without NaN. `attempt` is what `begin` gave; None: one for this commit alone. `moved` is called
    with each piece that is written. An error leaves the older checkpoints as they were, and nothing of this one.

    Raises:
        OSError: from the disk, also when too little of it is free. Superseded: another process writes the run now.
    """
    make(run_dir)
    attempt = attempt or begin(run_dir)
    sweep(run_dir, attempt.number)
    _preflight(run_dir, sum(content.nbytes for content in files.values()))
    final, staging = folder(run_dir, step), run_dir / f".tmp-{step:08d}-{attempt.number}"
    try:
        staging.mkdir()
        seal(staging, step, files, manifest, moved)
        refuse_superseded(run_dir, attempt)
        if os.path.lexists(final):
            os.rename(final, run_dir / f".old-{final.name}-{attempt.number}")
        os.rename(staging, final)  # from here on it exists
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        put_back(run_dir, attempt.number)
        refuse_superseded(run_dir, attempt)
        raise
    sync(run_dir)
    return final


def publish(checkpoint: Path, attempt: Attempt) -> None:
    """After its commit: what it has replaced is deleted, and `last.pt` leads to it.

    Raises:
        OSError: the checkpoint is there all the same. Superseded: another process writes the run now.
    """
    sweep(checkpoint.parent, attempt.number)
    refuse_superseded(checkpoint.parent, attempt)
    link_newest(checkpoint)


def make(path: Path) -> None:
    if not path.is_dir():
        make(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def _preflight(run_dir: Path, size: int) -> None:
    disk = os.statvfs(run_dir)
    if (free := disk.f_bavail * disk.f_frsize) < (need := 1.1 * size):
        text = f"a checkpoint needs about {need / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are free"
        raise OSError(errno.ENOSPC, text, str(run_dir))


def link_newest(checkpoint: Path) -> None:
    run_dir, root = checkpoint.parent, checkpoint.parent.parent
    temporary = root / f".{LAST}-{run_dir.name}"
    temporary.unlink(missing_ok=True)
    os.symlink(f"{run_dir.name}/{checkpoint.name}", temporary)
    os.rename(temporary, root / LAST)
    sync(root)
