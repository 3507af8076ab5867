"""The checkpoints that stay, and those that are set aside where another history begins."""

import errno
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.checkpoints import hidden, holds, put, steps

from trainer.checkpoint.locate import checkpoints
from trainer.checkpoint.retention import link_best, retain, set_aside


def test_retention_keeps_the_newest_valid_and_the_best(run: Path) -> None:
    losses = {1: 5.0, 2: 1.0, 3: 1.0, 4: None, 5: 3.0, 6: 2.0}
    for step, loss in losses.items():
        put(run, step, metrics={} if loss is None else {"val/loss": loss, "val/accuracy": -loss})
    put(run, 7)  # without metrics at all
    (run / "step-00000006" / "state.json").write_bytes(b"")
    (run / "step-00000099").mkdir()  # torn: doesn't count
    base = run.with_name("base")
    shutil.copytree(run, base)

    def left(keep: int, best: str | None, every: int | None = None) -> list[int]:
        shutil.rmtree(run)
        shutil.copytree(base, run)
        retain(run, keep, best, every)
        assert hidden(run) == []
        return steps(run)

    assert left(2, None) == [5, 6, 7, 99]
    assert left(2, "val/loss") == [2, 5, 6, 7, 99]
    assert left(3, "max val/accuracy") == [2, 4, 5, 6, 7, 99]
    assert left(2, "max val/loss") == [1, 5, 6, 7, 99]
    assert left(3, "val/unknown") == [4, 5, 6, 7, 99]
    assert left(2, None, every=2) == [2, 4, 5, 6, 7, 99]
    assert left(9, "val/loss") == [1, 2, 3, 4, 5, 6, 7, 99]


def test_another_history(run: Path) -> None:
    for step in (1, 2, 3):
        put(run, step)
    assert set_aside(run, 3) == [] and hidden(run) == []
    for again in range(2):
        names = set_aside(run, 1)
        assert [name[: len(".abandoned-step-00000002")] for name in names] == [
            ".abandoned-step-00000002",
            ".abandoned-step-00000003",
        ]
        assert steps(run) == [1] and holds(run / os.readlink(run.parent / "last.pt").removeprefix("run/")) == (1, 1)
        assert len(hidden(run)) == 2 * again + 2
        for step in (2, 3):
            put(run, step)
    assert len(set_aside(run, 0)) == 3 and checkpoints(run) == []


def test_another_history_where_there_are_no_links(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        put(run, step)
    (run.parent / "last.pt").unlink()
    monkeypatch.setattr(os, "symlink", Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted")))
    assert len(set_aside(run, 1)) == 1 and steps(run) == [1]


def best_of(run: Path) -> int | None:
    link = run.parent / "best.pt"
    return holds(link.resolve())[0] if os.path.lexists(link) else None


def test_best_is_a_link_to_the_best(run: Path) -> None:
    for step, loss in {1: 2.0, 2: 1.0, 3: 3.0}.items():
        put(run, step, metrics={"val/loss": loss})
    link_best(run, "max val/loss")
    assert best_of(run) == 3 and os.readlink(run.parent / "best.pt") == "run/step-00000003"
    link_best(run, "val/loss")
    assert best_of(run) == 2
    put(run, 4, metrics={"val/loss": 0.5})
    assert best_of(run) == 2  # until it is said
    link_best(run, "val/loss")
    assert best_of(run) == 4
    set_aside(run, 2, "val/loss")
    assert best_of(run) == 2
    set_aside(run, 0, "val/loss")
    assert best_of(run) is None


@pytest.mark.parametrize("best", [None, "val/unknown"])
def test_best_is_never_another_runs(run: Path, best: str | None) -> None:
    """It is of the run of last.pt, or it is not there. That run's checkpoints stay."""
    other = run.with_name("other")
    put(other, 7, metrics={"val/loss": 2.0})
    link_best(other, "val/loss")
    put(run, 1, metrics={"val/loss": 1.0})
    link_best(run, best)
    assert best_of(run) is None and steps(other) == [7]


def test_a_file_of_the_users_that_is_called_best_stays(run: Path) -> None:
    put(run, 1, metrics={"val/loss": 1.0})
    own = run.parent / "best.pt"
    own.write_text("precious")
    with pytest.raises(OSError, match="is no link to a checkpoint, and stays; rename it"):
        link_best(run, "val/loss")
    link_best(run, None)
    set_aside(run, 0, "val/loss")
    assert own.read_text() == "precious" and not own.is_symlink()
