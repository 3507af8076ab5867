"""Links `best.pt` to the best checkpoint, deletes superfluous ones, and sets aside an abandoned history."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.checkpoint.cleanup import delete
from trainer.checkpoint.commit import is_link, link
from trainer.checkpoint.locate import BEST, LAST, checkpoints, hidden_name, hide, step_of
from trainer.checkpoint.manifest import MANIFEST, Damaged, verify
from trainer.files import sync
from trainer.log import log


def retain(run_dir: Path, keep: int, best: str | None, every: int | None) -> None:
    """Delete valid checkpoints except the newest `keep`, the best one, and those at multiples of `every` steps.

    Invalid checkpoints don't count; hashes are not checked. A checkpoint with somebody else's files stays. `best` is
    `trainer.checkpoint.keep_best`, a metric in the manifests. An OSError is raised once all others are deleted.
    """
    assert keep >= 2
    manifests = _manifests(run_dir)
    metrics = {path: manifest.get("metrics") for path, manifest in manifests.items()}
    leader = _leader(metrics, best)
    failed: list[OSError] = []
    due = list(metrics)[:-keep]
    for checkpoint in due:
        if checkpoint != leader and not (every and step_of(checkpoint) % every == 0):
            if others := sorted(set(os.listdir(checkpoint)) - {MANIFEST, *manifests[checkpoint]["files"]}):
                if checkpoint == due[-1]:  # once
                    log.warning("%s: holds %s, which is not Echelon's, and is not deleted", checkpoint, others[0])
                continue
            try:
                delete(checkpoint, hidden_name(checkpoint, "trash"))
            except OSError as error:
                failed.append(error)
    if failed:
        raise failed[0]


def link_best(run_dir: Path, best: str | None) -> None:
    """Link `best.pt` to the best checkpoint of this run. Without one, remove the link, which may be another run's."""
    metrics = {path: manifest.get("metrics") for path, manifest in _manifests(run_dir).items()} if best else {}
    leader, link_path = _leader(metrics, best), run_dir.parent / BEST
    if leader is None:
        if is_link(link_path):
            link_path.unlink(missing_ok=True)
    elif not is_link(link_path) or os.readlink(link_path) != f"{run_dir.name}/{leader.name}":
        link(leader, BEST)


def _manifests(run_dir: Path) -> dict[Path, dict[str, Any]]:
    manifests: dict[Path, dict[str, Any]] = {}
    for checkpoint in checkpoints(run_dir):
        with suppress(Damaged):
            manifests[checkpoint] = verify(checkpoint, hashes=False)
    return manifests


def _leader(metrics: dict[Path, Any], best: str | None) -> Path | None:
    name, sign = parse_best(best or "")
    values = {path: found.get(name) for path, found in metrics.items() if isinstance(found, dict)}
    scores = {path: sign * value for path, value in values.items() if isinstance(value, int | float)}
    return min(scores, key=lambda path: scores[path], default=None)


def parse_best(best: str) -> tuple[str, int]:
    """Return the metric of `trainer.checkpoint.keep_best`, and -1 if larger is better ("max NAME"), else 1."""
    name = best.removeprefix("max ")
    return name, 1 if name == best else -1


def set_aside(run_dir: Path, after_step: int, best: str | None = None) -> list[str]:
    """Rename the checkpoints above `after_step`, from which the run resumes, and return their new names."""
    found = checkpoints(run_dir)
    older = [path for path in found if step_of(path) <= after_step]
    if older and older != found and os.path.lexists(run_dir.parent / LAST):  # not all file systems have links
        link(older[-1], LAST)
    names = [hide(path, "abandoned").name for path in found[len(older) :]]
    if names:
        sync(run_dir)
        if (run_dir.parent / BEST).is_symlink():
            link_best(run_dir, best)
    return names
