"""Deletes the checkpoints that need not stay, and sets aside those of an abandoned history."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.checkpoint.cleanup import delete
from trainer.checkpoint.commit import link_newest
from trainer.checkpoint.locate import LAST, checkpoints, hidden_name, hide, step_of
from trainer.checkpoint.manifest import Damaged, sync, verify


def retain(run_dir: Path, keep: int, best: str | None, every: int | None) -> None:
    """Delete valid checkpoints but the newest `keep`, the best one, and those of steps that `every` divides.

    A checkpoint that is not valid does not count; hashes are not checked here. At least two stay. `best` is
    `trainer.checkpoint.keep_best`, a metric in the manifests. Among equal checkpoints the older one is the best. A
    checkpoint without the metric is never the best.
    """
    assert keep >= 2
    metrics: dict[Path, Any] = {}
    for checkpoint in checkpoints(run_dir):
        with suppress(Damaged):
            metrics[checkpoint] = verify(checkpoint, hashes=False).get("metrics")
    name, sign = parse_best(best or "")
    values = {path: found.get(name) for path, found in metrics.items() if isinstance(found, dict)}
    scores = {path: sign * value for path, value in values.items() if isinstance(value, int | float)}
    leader = min(scores, key=lambda path: scores[path], default=None)
    failed: list[OSError] = []
    for checkpoint in list(metrics)[:-keep]:
        if checkpoint != leader and not (every and step_of(checkpoint) % every == 0):
            try:
                delete(checkpoint, hidden_name(checkpoint, "trash"))
            except OSError as error:
                failed.append(error)
    if failed:
        raise failed[0]


def parse_best(best: str) -> tuple[str, int]:
    """Parse `trainer.checkpoint.keep_best` into a metric and its sign: smaller is better, "max NAME" excepted."""
    name = best.removeprefix("max ")
    return name, 1 if name == best else -1


def set_aside(run_dir: Path, after_step: int) -> list[str]:
    """Rename the checkpoints above `after_step`, and return their new names: the run goes on from `after_step`."""
    found = checkpoints(run_dir)
    older = [path for path in found if step_of(path) <= after_step]
    if older and older != found and os.path.lexists(run_dir.parent / LAST):  # not all file systems have links
        link_newest(older[-1])
    names = [hide(path, "abandoned").name for path in found[len(older) :]]
    if names:
        sync(run_dir)
    return names
