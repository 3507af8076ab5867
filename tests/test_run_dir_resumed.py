"""A run that goes on in its folder: it begins nothing anew beside what is there, and one process at a time writes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import make

from trainer.callback import Callback
from trainer.errors import ConfigError
from trainer.loggers.metrics_file import MetricsFile
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")


def test_auto_does_not_begin_anew_in_the_folder_of_a_run_that_has_ended():
    make(max_steps=4).fit()
    with pytest.raises(
        ConfigError, match=r"^trainer\.run_dir=runs/r: holds a run that has ended, and other/r has no check"
    ):
        make(max_steps=2, resume="auto", checkpoint={"dir": "other"})


def test_a_file_where_the_checkpoints_should_be_is_refused():
    Path("ckpt").mkdir()
    Path("ckpt/r").touch()
    with pytest.raises(
        ConfigError, match=r"^trainer\.checkpoint\.dir=ckpt/r: can't be written: File exists; give anoth"
    ):
        make()
    assert not Path("runs").exists()


class Killed(Callback):
    """As by SIGKILL, at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            trainer.saver.close()
            raise SystemExit


@pytest.mark.parametrize("again", [{"resume": "auto"}, {"attempt": "1"}], ids=str)
def test_a_run_whose_checkpoints_are_not_there_does_not_begin_anew(again, monkeypatch):
    """A disk that is not mounted, another folder."""
    metrics = Path("runs/r/metrics.jsonl")
    with pytest.raises(SystemExit):
        make(callbacks={"metrics_file": MetricsFile(), "stops": Killed(3)}, log_every_steps=1).fit()
    lines = metrics.read_bytes()
    Path("ckpt").rename("away")
    monkeypatch.setenv("ECHELON_ATTEMPT", again.get("attempt", "0"))
    with pytest.raises(
        ConfigError,
        match=r"^trainer\.run_dir=runs/r: holds a run that has written checkpoints, and ckpt/r has no checkpoint of it"
        r"; give the trainer\.checkpoint\.dir of that run, or another trainer\.run_dir$",
    ):
        make(callbacks={"metrics_file": MetricsFile()}, resume=again.get("resume"))
    assert metrics.read_bytes() == lines
    monkeypatch.setenv("ECHELON_ATTEMPT", "0")
    make(callbacks={"metrics_file": MetricsFile()}, resume="auto", checkpoint={"dir": "away"}).fit()
    assert metrics.read_bytes().startswith(lines[: lines.index(b"\n")])


def test_a_run_that_has_no_checkpoint_yet_begins_anew():
    with pytest.raises(SystemExit):
        make(callbacks={"metrics_file": MetricsFile(), "stops": Killed(1)}, log_every_steps=1).fit()
    assert Path("runs/r/metrics.jsonl").read_bytes()
    make(callbacks={"metrics_file": MetricsFile()}, resume="auto", log_every_steps=1).fit()
    assert json.loads(Path("runs/r/metrics.jsonl").read_text().splitlines()[0])["step"] == 1


def test_one_process_at_a_time_writes_a_runs_folder():
    """Wherever its checkpoints are."""
    make(max_steps=1).fit()
    trainer = make(max_steps=1, run_dir="runs/s")
    code = (
        "import fcntl, os, sys; file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); "
        "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB); os.ftruncate(file, 0); "
        "os.pwrite(file, b'process 1 on host', 0); print(flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code]
    assert subprocess.run([*words, "runs/s/.lock"], capture_output=True).returncode == 1
    trainer.fit()
    files = {path: path.read_bytes() for path in Path("runs/r").rglob("*") if path.is_file() and path.name != ".lock"}
    with subprocess.Popen([*words, "runs/r/.lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout and first.stdout.readline()
        with pytest.raises(
            ConfigError,
            match=r"^trainer\.run_dir=runs/r: process 1 on host writes the run r; "
            r"wait for it to end, or use another trainer\.run_dir$",
        ):
            make(resume="ckpt/r", checkpoint={"dir": "other"})
        assert first.stdin
        first.stdin.close()
    assert all(path.read_bytes() == content for path, content in files.items())
    make(resume="ckpt/r", checkpoint={"dir": "other"}).fit()


def test_lines_that_are_missing_are_told_of():
    make(callbacks={"metrics_file": MetricsFile()}, max_steps=2, log_every_steps=1).fit()
    Path("runs/r/metrics.jsonl").write_text("")
    make(callbacks={"metrics_file": MetricsFile()}, max_steps=4, log_every_steps=1, resume="auto").fit()
    assert (
        "WARNING runs/r/metrics.jsonl: lines are missing: the file has 0 bytes"
        in Path("runs/r/logs/rank0.log").read_text()
    )
