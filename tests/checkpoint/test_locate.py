"""The checkpoint that a resume takes, and the way out where there is none."""

import logging
import os
import shutil
from pathlib import Path

import pytest
from support.checkpoints import hidden, put, steps
from support.messages import refuses

from trainer.checkpoint.locate import checkpoints, newest, note, noted_in, refuse_renamed, resolve
from trainer.checkpoint.manifest import Damaged
from trainer.errors import ConfigError


def test_newest_goes_back_past_damage(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert newest(run) is None and checkpoints(run) == []
    for step in (99_999_999, 5, 100_000_000, 7):
        put(run, step, fill=step % 256)
    assert steps(run) == [5, 7, 99_999_999, 100_000_000]
    (run / "step-00000000").write_text("a file")
    for step in (99_999_999, 100_000_000):
        (run / f"step-{step}" / "state.json").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "echelon"):
        assert newest(run) == run / "step-00000007"
    assert [record.name for record in caplog.records] == ["echelon"] * 2
    assert "step-100000000/state.json: 0 bytes, its manifest says 5000" in caplog.text
    assert steps(run) == [5, 7] and [name[:13] for name in hidden(run)] == [".bad-step-100", ".bad-step-999"]
    put(run, 8)  # a commit leaves damaged ones for inspection
    assert len(hidden(run)) == 2


def test_a_reader_is_told_and_changes_nothing(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3):
        put(run, step)
    (run / "step-00000003" / "state.json").write_bytes(b"")
    (run / "step-00000002").rename(run / ".old-step-00000002-0")  # a job is about to replace it
    with caplog.at_level(logging.WARNING, "echelon"):
        assert resolve("auto", run.parent, run, reads=True) == run / "step-00000001"
        assert resolve(str(run / "step-00000001"), run.parent, run) == run / "step-00000001"
    assert "damaged checkpoint, going back to step-00000001" in caplog.text
    assert hidden(run) == [".old-step-00000002-0"] and (run / "step-00000003").exists()


def test_none_valid_is_an_error_and_touches_nothing(run: Path) -> None:
    """A run must not start over by itself on the remains of its old one."""
    for step in (1, 2):
        (put(run, step) / "state.json").unlink()
    for _ in range(2):
        with pytest.raises(Damaged, match=r"none of the 2 .*step-00000002/state\.json: is missing"):
            newest(run)
    with pytest.raises(Damaged, match=r"resume=auto: none of the 2 .*; trainer\.resume=null starts a new run$"):
        resolve("auto", run.parent, None)
    for resume in ("auto", str(run)):
        with pytest.raises(Damaged, match=r"; trainer\.resume=null and another trainer\.run_dir start a new run$"):
            resolve(resume, run.parent, run)
    assert steps(run) == [1, 2]


def test_the_way_out_of_auto_is_not_looked_for_in_the_current_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (put(run, 1) / "state.json").unlink()
    (here := tmp_path / "here").mkdir()
    put(here, 2).rename(here / ".old-step-00000002-0")
    monkeypatch.chdir(here)
    with pytest.raises(Damaged, match=r"a new run$"):
        resolve("auto", run.parent, run)
    assert hidden(here) == [".old-step-00000002-0"]


def test_auto(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    a, b = root / "a", root / "b"
    assert resolve("auto", root, None) is None and resolve("auto", root, a) is None
    put(a, 10)
    put(b, 5)
    put(a, 20)
    put(b, 6)
    os.utime(a / "step-00000010", (4e9, 4e9))  # by the clock a was written last, by last.pt b was
    assert resolve("auto", root, None) == b / "step-00000006"
    assert resolve("auto", root, a) == a / "step-00000020"
    assert resolve("auto", root, root / "c") is None
    (b / "step-00000006" / "state.json").unlink()
    assert resolve("auto", root, None) == b / "step-00000005"  # what last.pt names is gone, its run is not
    for target in (None, "gone/step-00000001", "last.pt"):
        (root / "last.pt").unlink(missing_ok=True)
        if target:
            (root / "last.pt").symlink_to(target)
        assert resolve("auto", root, None) == a / "step-00000020"


def test_paths(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = run.parent
    for step in (1, 2):
        put(run, step)
    second = run / "step-00000002"
    for path in (root / "last.pt", second, run, f"{run}/"):
        assert resolve(str(path), Path("unused"), None) == second
    monkeypatch.chdir(root)
    assert resolve("last.pt", Path("unused"), None) == second
    shutil.copytree(second, root / "kept for the paper")
    assert resolve("kept for the paper", Path("unused"), None) == root / "kept for the paper"
    assert os.readlink(root / "last.pt") == "run/step-00000002"


def test_the_run_of_a_folder_has_its_checkpoints_elsewhere(run: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "runs" / "a").mkdir(parents=True)
    (folder / "checkpointed").write_text(str(run))
    with pytest.raises(ConfigError, match=r"runs/a: the run's checkpoints were in .*ckpt/run, where there are none"):
        resolve(str(folder), Path("unused"), None)
    put(run, 1)
    assert resolve(str(folder), Path("unused"), None) == run / "step-00000001"


def test_a_run_finds_its_checkpoints_where_it_was_moved_or_copied_to(tmp_path: Path, monkeypatch) -> None:
    """A note with the absolute path alone sent the tools of a copy to the checkpoints of the original."""
    project = tmp_path / "one"
    for folder in ("runs/a", "ckpt/a"):
        (project / folder).mkdir(parents=True)
    put(project / "ckpt" / "a", 1)
    (project / "runs" / "a" / "checkpointed").write_text(note(project / "runs" / "a", project / "ckpt" / "a"))
    shutil.copytree(project, copy := tmp_path / "two")
    assert noted_in(copy / "runs" / "a") == copy / "ckpt" / "a"
    shutil.move(copy / "runs" / "a", away := tmp_path / "archive")
    assert noted_in(away) == project / "ckpt" / "a"
    monkeypatch.chdir(project)
    refuse_renamed(Path("runs/a"), Path("ckpt"))
    os.rename("runs/a", "runs/final")
    with refuses("trainer.run_dir=runs/final", "ckpt/a", "runs/a", "ckpt/final"):  # fmt: skip
        refuse_renamed(Path("runs/final"), Path("ckpt"))
    os.rename("ckpt/a", "ckpt/final")
    refuse_renamed(Path("runs/final"), Path("ckpt"))


OLDER = r"; trainer\.resume=.*/run/step-00000001 is valid, or trainer\.resume=auto"


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("none", r"trainer\.resume=none: does not exist; give .*auto"),
        (".", r"trainer\.resume=\.: is not a checkpoint; give .*auto"),
        ("run/step-00000001/state.json", r"=run/step-00000001/state\.json: is not a checkpoint; give "),
        ("last.pt", r"=last\.pt: points to .*run/step-00000009, which does not exist; give "),
        ("loop", r"=loop: points to .*; give "),
        ("run/step-00000003", r"=run/step-00000003: .*MANIFEST\.json: is missing" + OLDER),
        ("run/step-00000002", r"=run/step-00000002: .*state\.json: 0 bytes.*" + OLDER),
        ("a\0b", r"=\'a\\x00b\'\.\.\.: is not a path; give .*auto$"),
        ("a" * 5000, r"=\'a{60}\'\.\.\.: is not a path; give .*auto$"),
        ("bad", r"=bad: none of the 1 checkpoints .*; trainer\.resume=null starts a new run"),
    ],
)
def test_messages(run: Path, monkeypatch: pytest.MonkeyPatch, resume: str, message: str) -> None:
    for step in (1, 2):
        put(run, step)
    (run / "step-00000002" / "state.json").write_bytes(b"")
    (run / "step-00000003").mkdir()
    (put(run.parent / "bad", 1) / "state.json").unlink()
    monkeypatch.chdir(run.parent)
    Path("last.pt").unlink()
    Path("last.pt").symlink_to("run/step-00000009")
    Path("loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=message) as error:
        resolve(resume, Path("unused"), None)
    assert "\n" not in str(error.value)
