"""Finds the checkpoint that `trainer.resume` means."""

import errno
import os
from contextlib import suppress
from pathlib import Path

from trainer.checkpoint.cleanup import move, put_back
from trainer.checkpoint.manifest import MANIFEST, STEP, Damaged, verify
from trainer.errors import ConfigError
from trainer.log import log

LAST = "last.pt"
BEST = "best.pt"
CHECKPOINTED = "checkpointed"  # a file in the run's own folder with the paths of its checkpoints; see `noted_in`


def folder(run_dir: Path, step: int) -> Path:
    return run_dir / f"step-{step:08d}"


def checkpoints(run_dir: Path, reads: bool = False) -> list[Path]:
    """Return all checkpoints of a run, oldest first, valid or not. Change nothing if `reads`: a job may run."""
    if not reads:
        put_back(run_dir)
    entries = run_dir.iterdir() if run_dir.is_dir() else []
    return sorted((path for path in entries if STEP.fullmatch(path.name) and path.is_dir()), key=step_of)


def newest(run_dir: Path, reads: bool = False) -> Path | None:
    """Find the newest valid checkpoint, or None. Damaged ones above it are renamed, with a warning, unless `reads`.

    Raises:
        Damaged: There are checkpoints, but none is valid. They stay where they are.
    """
    damaged: dict[Path, Damaged] = {}
    for checkpoint in reversed(checkpoints(run_dir, reads)):
        try:
            verify(checkpoint)
        except Damaged as error:
            damaged[checkpoint] = error
            continue
        for bad, error in damaged.items():
            log.warning("damaged checkpoint, going back to %s: %s", checkpoint.name, error)
            if not reads:
                with suppress(OSError):  # a checkpoint that can't be renamed is skipped all the same
                    hide(bad, "bad")
        return checkpoint
    for error in damaged.values():
        raise Damaged(f"none of the {len(damaged)} checkpoints in {run_dir} is valid: {error}")
    return None


def resolve(resume: str, root: Path, run_dir: Path | None, reads: bool = False) -> Path | None:
    """Find the checkpoint that `trainer.resume` means; None for `auto` if there is nothing to resume.

    `auto` is the newest valid one of `run_dir` or, without that, of the run under `root` that was written last. With
    `reads`, nothing in these folders changes.

    Raises:
        ConfigError: The path is not a checkpoint.
        Damaged: The checkpoint can't be used.
        OSError: The system fails in a way that may be transient.
    """
    ways = f"give DIR/{LAST}, DIR/{BEST}, a folder step-*, a run's folder, or auto"
    if not _can_be(resume):
        raise ConfigError(f"trainer.resume={resume[:60]!r}...: is not a path; {ways}")
    key, target = f"trainer.resume={resume}", Path(os.path.realpath(resume))
    fresh = f"trainer.resume=null {'and another trainer.run_dir start' if run_dir else 'starts'} a new run"
    try:
        if resume == "auto":
            run_dir = run_dir or _last_run(root, reads)
            return newest(run_dir, reads) if run_dir else None
        target = _checkpoints_of(key, target, reads)
        if os.path.lexists(target / MANIFEST) or target in checkpoints(target.parent, reads):
            verify(target)
            return target
        if checkpoints(target, reads):
            return newest(target, reads)
    except Damaged as error:
        fix = fresh if resume == "auto" else _valid_before(target, reads) or fresh
        raise Damaged(f"{key}: {error}; {fix}") from error
    except PermissionError as error:  # any other system error may be transient, so the caller may retry
        raise ConfigError(f"{key}: {error}; make it readable, or {fresh}") from error
    why = "is not a checkpoint" if target.exists() else "does not exist"
    if os.path.islink(resume):
        why = f"points to {target}, which {why}"
    raise ConfigError(f"{key}: {why}; {ways}")


def _checkpoints_of(key: str, folder: Path, reads: bool) -> Path:
    if (saved := noted_in(folder)) is None:
        return folder
    if not checkpoints(saved, reads):
        raise ConfigError(f"{key}: the run's checkpoints were in {saved}, where there are none; give a checkpoint")
    return saved


def note(run_dir: Path, saved: Path) -> str:
    """Return the note in a run's own folder: the relative and the absolute path of its checkpoints.

    The first survives a move of the whole project, the second a move of the run's folder alone.
    """
    saved = saved.resolve()
    return f"{os.path.relpath(saved, run_dir.resolve())}\n{saved}"


def noted_in(run_dir: Path) -> Path | None:
    """Return the folder of a run's checkpoints from the note in the run's own folder; None without a note."""
    if not (file := run_dir / CHECKPOINTED).is_file():
        return None
    lines = file.read_text(errors="replace").splitlines() or [""]
    places = [Path(os.path.realpath(run_dir / line)) for line in lines]
    return next((place for place in places if checkpoints(place, reads=True)), places[-1])


def refuse_renamed(run_dir: Path, root: Path) -> None:
    saved = noted_in(run_dir)
    if saved and saved.name != run_dir.name and checkpoints(saved, reads=True):
        raise ConfigError(
            f"trainer.run_dir={run_dir}: its checkpoints are in {os.path.relpath(saved)}, so the folder was renamed; "
            f"rename it to {run_dir.with_name(saved.name)}, or the checkpoints to {root / run_dir.name}"
        )


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _can_be(text: str) -> bool:
    try:
        os.lstat(text)
    except (OSError, ValueError) as error:  # ValueError: a NUL
        return getattr(error, "errno", errno.ENAMETOOLONG) != errno.ENAMETOOLONG
    return True


def _last_run(root: Path, reads: bool) -> Path | None:
    linked = Path(os.path.realpath(root / LAST)).parent
    if checkpoints(linked, reads):
        return linked
    runs = {run: checkpoints(run, reads) for run in root.iterdir()} if root.is_dir() else {}
    written = {run: max(path.stat().st_mtime for path in found) for run, found in runs.items() if found}
    return max(written, key=lambda run: written[run], default=None)


def _valid_before(target: Path, reads: bool) -> str:
    siblings = checkpoints(target.parent, reads)
    for older in reversed(siblings[: siblings.index(target)] if target in siblings else []):
        with suppress(Damaged):
            verify(older)
            return f"trainer.resume={older} is valid, or trainer.resume=auto"
    return ""


def hide(path: Path, why: str) -> Path:
    move(path, hidden := hidden_name(path, why))
    return hidden


def hidden_name(path: Path, why: str) -> Path:
    return path.with_name(f".{why}-{path.name}-{os.urandom(4).hex()}")
