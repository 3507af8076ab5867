"""Folders of runs that were killed go with the next start; all other folders stay."""

import os
import signal
import time
from pathlib import Path

import pytest
from support.cli import QUICK, TOY, popen, run
from support.faults import processes

from trainer.process import temporary
from trainer.process.temporary import sweep, temporary_folder

WORDS = [*TOY, *QUICK, "trainer.run_dir=runs/r", "data.workers=1", "trainer.accelerator=cpu", "trainer.restarts=0"]
LONG = ["trainer.max_steps=1000000", "trainer.validate_every=null"]


def kill_a_run(cwd: Path, *words: str) -> None:
    """All processes at once, as a machine that goes away; in a step, when data workers have their sockets."""
    with popen([*WORDS, *LONG, *words], cwd, TMPDIR=str(cwd / "tmp")) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 3/"):
                break
        for pid in processes(cwd):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def left(cwd: Path) -> list[str]:
    return sorted(path.name for path in (cwd / "tmp").iterdir() if path.name.startswith(("echelon-", "pymp-")))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_next_start_removes_what_a_killed_run_has_left(ranks, tmp_path):
    (tmp_path / "tmp").mkdir()
    kill_a_run(tmp_path, f"trainer.devices={ranks}")
    (folder,) = left(tmp_path)
    assert folder.startswith("echelon-") and list((tmp_path / "tmp" / folder).glob("listener-*"))
    done = run([*WORDS, "trainer.max_steps=4", "trainer.resume=auto"], tmp_path, TMPDIR=str(tmp_path / "tmp"))
    assert done.code == 0, done.err
    assert left(tmp_path) == []


def test_a_folder_with_a_long_name_has_sockets_too(tmp_path):
    (long := tmp_path / ("long" * 30)).mkdir()
    done = run([*WORDS, "trainer.max_steps=4"], tmp_path, TMPDIR=str(long))
    assert done.code == 0, done.err
    assert not list(long.glob("echelon-*"))


def test_a_run_that_lives_keeps_its_folder(tmp_path):
    (tmp_path / "tmp").mkdir()
    with popen([*WORDS, *LONG], tmp_path, TMPDIR=str(tmp_path / "tmp")) as process:
        deadline = time.monotonic() + 60
        metrics = tmp_path / "runs" / "r" / "metrics.jsonl"  # before step 1 a signal ends the run at once
        while not (metrics.exists() and metrics.read_text() and list((tmp_path / "tmp").glob("echelon-*/listener-*"))):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        before = left(tmp_path)
        sweep(tmp_path / "tmp")
        assert left(tmp_path) == before
        process.terminate()
        process.communicate()
    assert (process.returncode, left(tmp_path)) == (75, [])


def test_tmpdir_is_made_anew_if_a_cleaner_has_removed_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with temporary_folder() as folder:
        assert folder.parent == tmp_path / "gone"


def test_what_is_no_runs_stays(tmp_path, monkeypatch):
    """A user's own folder, a link, a file, a folder of another user's."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "echelon-data").mkdir()
    (tmp_path / "echelon-file").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / temporary.MARK).write_text(os.uname().nodename)
    (tmp_path / "echelon-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "echelon-theirs").mkdir()
    (tmp_path / "echelon-theirs" / temporary.MARK).write_text(os.uname().nodename)
    (tmp_path / "echelon-host").mkdir()
    (tmp_path / "echelon-host" / temporary.MARK).write_text("another host")
    before = set(tmp_path.rglob("*"))
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: 4711)
        sweep(tmp_path)
    assert set(tmp_path.rglob("*")) == before
    with temporary_folder() as folder:
        assert folder.parent == tmp_path and not (tmp_path / "echelon-theirs").exists()
        sweep(tmp_path)
        assert folder.exists()
    assert {path.name for path in tmp_path.iterdir()} == {
        *("echelon-data", "echelon-file", "echelon-host", "echelon-link", "elsewhere")
    }
