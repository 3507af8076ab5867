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
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.checkpoint.debris import put_back, sweep
from trainer.checkpoint.fence import Attempt, next_attempt, refuse_superseded
from trainer.checkpoint.manifest import MANIFEST, STEP, Damaged, seal, sync, verify
from trainer.errors import ConfigError

log = logging.getLogger("echelon")

LAST = "last.pt"


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
    _link(checkpoint)


def folder(run_dir: Path, step: int) -> Path:
    return run_dir / f"step-{step:08d}"


def checkpoints(run_dir: Path) -> list[Path]:
    """All of a run, oldest first, valid or not."""
    put_back(run_dir)
    entries = run_dir.iterdir() if run_dir.is_dir() else []
    return sorted((path for path in entries if STEP.fullmatch(path.name) and path.is_dir()), key=_step)


def newest(run_dir: Path) -> Path | None:
    """The newest valid checkpoint; damaged ones above it are put out of the way, with a warning. None: there is none.

    Raises:
        Damaged: there are checkpoints, and none is valid. They stay where they are.
    """
    damaged: dict[Path, Damaged] = {}
    for checkpoint in reversed(checkpoints(run_dir)):
        try:
            verify(checkpoint)
        except Damaged as error:
            damaged[checkpoint] = error
            continue
        for bad, error in damaged.items():
            log.warning("damaged checkpoint, going back to %s: %s", checkpoint.name, error)
            with suppress(OSError):  # what can't be renamed can still be passed over
                _hide(bad, "bad")
        return checkpoint
    for error in damaged.values():
        raise Damaged(f"none of the {len(damaged)} checkpoints in {run_dir} is valid: {error}")
    return None


def resolve(resume: str, root: Path, run_dir: Path | None) -> Path | None:
    """The checkpoint that `trainer.resume` means; None for `auto` where there is nothing to resume.

    `auto` is the newest valid one of `run_dir` or, without that, of the run under `root` that was written last.

    Raises:
        ConfigError: it is no checkpoint. Damaged: it is one that can't be used. OSError: what may pass.
    """
    ways = f"give DIR/{LAST}, a folder step-*, a run's folder, or auto"
    if not _can_be(resume):
        raise ConfigError(f"trainer.resume={resume[:60]!r}...: is no path; {ways}")
    key, target = f"trainer.resume={resume}", Path(os.path.realpath(resume))
    try:
        if resume == "auto":
            run_dir = run_dir or _last_run(root)
            return newest(run_dir) if run_dir else None
        if target in checkpoints(target.parent) or os.path.lexists(target / MANIFEST):
            verify(target)
            return target
        if checkpoints(target):
            return newest(target)
    except Damaged as error:
        raise Damaged(f"{key}: {error}; {_way_out(target)}") from error
    except PermissionError as error:  # any other error of the system may pass: another try may meet none
        raise ConfigError(f"{key}: {error}; make it readable, or trainer.resume=null starts anew") from error
    why = "is not a checkpoint" if target.exists() else "does not exist"
    if os.path.islink(resume):
        why = f"points to {target}, which {why}"
    raise ConfigError(f"{key}: {why}; {ways}")


def retain(run_dir: Path, keep: int, best: str | None, every: int | None) -> None:
    """Deletes all valid checkpoints but the newest `keep`, the best one, and those of steps that `every` divides; one
    that is not valid doesn't count.

    `best` is `trainer.checkpoint.keep_best`, of the manifests' "metrics". The older of equals is the better one, and
    one without the metric is no candidate. Validity here is the manifest and the sizes; at least two stay.
    """
    assert keep >= 2
    metrics: dict[Path, dict[str, float]] = {}
    for checkpoint in checkpoints(run_dir):
        with suppress(Damaged):
            metrics[checkpoint] = verify(checkpoint, hashes=False).get("metrics", {})
    name, sign = parse_best(best or "")
    scores = {path: sign * values[name] for path, values in metrics.items() if name in values}
    leader = min(scores, key=lambda path: scores[path], default=None)
    for checkpoint in list(metrics)[:-keep]:
        if checkpoint != leader and not (every and _step(checkpoint) % every == 0):
            shutil.rmtree(_hide(checkpoint, "trash"), ignore_errors=True)


def parse_best(best: str) -> tuple[str, int]:
    """The metric that `trainer.checkpoint.keep_best` names, and its sign: smaller is better, but for "max NAME"."""
    name = best.removeprefix("max ")
    return name, 1 if name == best else -1


def set_aside(run_dir: Path, after_step: int) -> list[str]:
    """Renames the checkpoints above `after_step`, from where another history begins; returns their new names."""
    found = checkpoints(run_dir)
    older = [path for path in found if _step(path) <= after_step]
    if older and older != found and os.path.lexists(run_dir.parent / LAST):  # not all file systems have links
        _link(older[-1])
    names = [_hide(path, "abandoned").name for path in found[len(older) :]]
    if names:
        sync(run_dir)
    return names


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _can_be(text: str) -> bool:
    try:
        os.lstat(text)
    except (OSError, ValueError) as error:  # of a NUL
        return getattr(error, "errno", errno.ENAMETOOLONG) != errno.ENAMETOOLONG
    return True


def _last_run(root: Path) -> Path | None:
    linked = Path(os.path.realpath(root / LAST)).parent
    if checkpoints(linked):
        return linked
    runs = {run: checkpoints(run) for run in root.iterdir()} if root.is_dir() else {}
    written = {run: max(path.stat().st_mtime for path in found) for run, found in runs.items() if found}
    return max(written, key=lambda run: written[run], default=None)


def _way_out(target: Path) -> str:
    """From a damaged checkpoint: to the newest valid one before it."""
    siblings = checkpoints(target.parent)
    for older in reversed(siblings[: siblings.index(target)] if target in siblings else []):
        with suppress(Damaged):
            verify(older)
            return f"trainer.resume={older} is valid, or trainer.resume=auto"
    return "trainer.resume=null starts anew"


def make(path: Path) -> None:
    if not path.is_dir():
        make(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def _hide(path: Path, why: str) -> Path:
    hidden = path.with_name(f".{why}-{path.name}-{os.urandom(4).hex()}")
    os.rename(path, hidden)
    return hidden


def _preflight(run_dir: Path, size: int) -> None:
    disk = os.statvfs(run_dir)
    if (free := disk.f_bavail * disk.f_frsize) < (need := 1.1 * size):
        text = f"a checkpoint needs about {need / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are free"
        raise OSError(errno.ENOSPC, text, str(run_dir))


def _link(checkpoint: Path) -> None:
    run_dir, root = checkpoint.parent, checkpoint.parent.parent
    temporary = root / f".{LAST}-{run_dir.name}"
    temporary.unlink(missing_ok=True)
    os.symlink(f"{run_dir.name}/{checkpoint.name}", temporary)
    os.rename(temporary, root / LAST)
    sync(root)
