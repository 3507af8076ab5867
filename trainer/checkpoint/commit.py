"""Commits checkpoints atomically: files are staged, hashed, synced and renamed once. Standard library only.

    <dir>/last.pt                     link to the newest checkpoint
    <dir>/best.pt                     link to the best checkpoint of the same run, with `keep_best`
    <dir>/<run>/step-00001200/        a checkpoint; never changed once it has this name
    <dir>/<run>/.tmp-* .trash-*       left by a killed process; the run's next writer deletes them
    <dir>/<run>/.old-*                replaced by a checkpoint of the same step: restored if the new one is missing,
                                      kept as .abandoned-* if somebody has put a file into it
    <dir>/<run>/.bad-* .abandoned-*   damaged, or of a history that a resume has left; kept until someone deletes them
    <dir>/<run>/.lock                 held by the one process that writes the run
    <dir>/<run>/ATTEMPT               the process that began last, in case the lock fails

Each rank stages its own files; rank 0 then writes the one manifest and does the one rename. A process that was replaced
while it was suspended commits nothing: see fence.py.
"""

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer import timeouts
from trainer.checkpoint.cleanup import move, put_back, sweep
from trainer.checkpoint.fence import Attempt, next_attempt, refuse_superseded
from trainer.checkpoint.locate import LAST, folder, hide
from trainer.checkpoint.manifest import MANIFEST, Entries, seal, write_files
from trainer.files import sync

LINKED = re.compile(r"[^/]+/step-\d{8,}")  # what last.pt and best.pt point to


def begin(run_dir: Path) -> Attempt:
    """Make this process the run's writer, and delete earlier processes' unfinished files.

    A process that was suspended before its rename then has nothing left to rename.
    """
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
    """Commit `files`, by name, as the run's checkpoint at `step`, replacing an older one of this step.

    `manifest` is JSON without NaN. Without `attempt`, the result of `begin`, this commit makes its own. `moved` is
    called after each written piece. An error leaves older checkpoints unchanged, and none of these files behind.

    Raises:
        OSError: The disk fails, or has too little space.
        Superseded: Another process writes the run now.
    """
    make(run_dir)
    attempt = attempt or begin(run_dir)
    sweep(run_dir, attempt.number)
    with _whole_or_nothing(run_dir, step, attempt):
        return _rename(run_dir, step, _write(run_dir, step, files, attempt, moved), manifest, attempt)


def stage(
    run_dir: Path, step: int, files: Mapping[str, memoryview], attempt: Attempt, moved: Callable[[], object]
) -> Entries:
    """Write this rank's files of the checkpoint at `step`; ranks may do so in any order."""
    entries = _write(run_dir, step, files, attempt, moved)
    sync(staged(run_dir, step, attempt))
    return entries


def commit_staged(
    run_dir: Path, step: int, parts: list[Entries], manifest: Mapping[str, Any], attempt: Attempt
) -> Path:
    """Commit the files that ranks have staged; `parts` has the manifest entries of each rank.

    Raises:
        OSError, Superseded: As in `commit`, or this process does not see a rank's file.
    """
    with _whole_or_nothing(run_dir, step, attempt):
        for rank, entries in enumerate(parts):
            _refuse_unseen(staged(run_dir, step, attempt), rank, entries)
        entries = {name: entry for part in parts for name, entry in part.items()}
        return _rename(run_dir, step, entries, manifest, attempt)


def discard(run_dir: Path, step: int, attempt: Attempt) -> None:
    shutil.rmtree(staged(run_dir, step, attempt), ignore_errors=True)


def publish(checkpoint: Path, attempt: Attempt) -> None:
    """Delete the checkpoint that this one has replaced, and point `last.pt` to it. An error leaves it committed."""
    sweep(checkpoint.parent, attempt.number)
    refuse_superseded(checkpoint.parent, attempt)
    link(checkpoint, LAST)


def make(path: Path) -> None:
    """Make a folder and its parents, and sync them to disk."""
    if not path.is_dir():
        make(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def staged(run_dir: Path, step: int, attempt: Attempt) -> Path:
    return run_dir / f".tmp-{step:08d}-{attempt.number}"


def link(checkpoint: Path, name: str) -> None:
    """Point `last.pt` or `best.pt` to a checkpoint; raise OSError if somebody's own file has this name."""
    run_dir, root = checkpoint.parent, checkpoint.parent.parent
    temporary = root / f".{name}-{run_dir.name}"
    for path in (root / name, temporary):
        if os.path.lexists(path) and not is_link(path):
            raise OSError(errno.EEXIST, "is no link to a checkpoint, and stays; rename it", str(path))
    temporary.unlink(missing_ok=True)
    os.symlink(f"{run_dir.name}/{checkpoint.name}", temporary)
    os.rename(temporary, root / name)
    sync(root)


def is_link(path: Path) -> bool:
    """Return whether `path` is a link that `link` may have made."""
    if not path.is_symlink():
        return False
    target = os.readlink(path)
    return target == path.name or LINKED.fullmatch(target) is not None  # a link to itself is dangling


@contextmanager
def _whole_or_nothing(run_dir: Path, step: int, attempt: Attempt) -> Iterator[None]:
    try:
        yield
    except BaseException:
        discard(run_dir, step, attempt)
        put_back(run_dir, attempt.number)
        refuse_superseded(run_dir, attempt)
        raise


def _write(
    run_dir: Path, step: int, files: Mapping[str, memoryview], attempt: Attempt, moved: Callable[[], object]
) -> Entries:
    staging = staged(run_dir, step, attempt)
    _preflight(run_dir, sum(content.nbytes for content in files.values()))
    staging.mkdir(exist_ok=True)
    return write_files(staging, files, moved)


def _rename(run_dir: Path, step: int, entries: Entries, manifest: Mapping[str, Any], attempt: Attempt) -> Path:
    final, staging = folder(run_dir, step), staged(run_dir, step, attempt)
    seal(staging, step, entries, manifest)
    refuse_superseded(run_dir, attempt)
    if os.path.lexists(final):
        ours = (final / MANIFEST).is_file()
        move(final, run_dir / f".old-{final.name}-{attempt.number}") if ours else hide(final, "bad")
    os.rename(staging, final)  # from here on the checkpoint exists
    sync(run_dir)
    return final


def _refuse_unseen(staging: Path, rank: int, entries: Entries) -> None:
    deadline = time.monotonic() + timeouts.VISIBLE_S
    for name, (size, _) in entries.items():
        while not (staging / name).exists() or (staging / name).stat().st_size != size:
            if time.monotonic() > deadline:
                why = f"rank {rank} has written this file, but rank 0 does not see it"
                raise OSError(errno.ENOENT, why, str(staging / name))
            time.sleep(timeouts.VISIBLE_EVERY_S)


def _preflight(run_dir: Path, size: int) -> None:
    disk = os.statvfs(run_dir)
    if (free := disk.f_bavail * disk.f_frsize) < (need := 1.1 * size):
        text = f"a checkpoint needs about {need / 2**20:.1f} MiB, but {free / 2**20:.1f} MiB are free"
        raise OSError(errno.ENOSPC, text, str(run_dir))
