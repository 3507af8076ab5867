"""Folders that go away while a run uses them: the run's own, and what lies in TMPDIR."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli import Result, lines, popen
from support.faults import RUN, events, nobody_left, wait_for, whole

SLOW = "callbacks.probe.step_s=0.2"


def run_and_remove(remove: Callable[[], object], cwd: Path, *more: str) -> Result:
    """Run, and call `remove` once there is a checkpoint."""
    process: subprocess.Popen[str] = popen([*RUN, SLOW, *more], cwd)
    try:
        wait_for(cwd / "runs" / "r" / "checkpointed")
        remove()
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    return Result(process.returncode, out, err)


def empty_tmpdir() -> None:
    for path in Path(os.environ["TMPDIR"]).iterdir():
        shutil.rmtree(path)


@pytest.mark.slow
def test_a_run_folder_that_is_removed_begins_anew(golden, tmp_path):
    """The earlier lines of metrics are lost, the later ones and the summary are there."""
    result = run_and_remove(lambda: shutil.rmtree(tmp_path / "runs" / "r"), tmp_path)
    assert (result.code, result.err) == (0, "")
    assert "runs/r/metrics.jsonl: was removed during the run; its earlier lines are lost" in result.out
    found = lines(tmp_path / "runs" / "r")
    assert found and found == lines(golden / "runs" / "r")[-len(found) :]
    assert (tmp_path / "runs" / "r" / "summary.json").exists()
    nobody_left(tmp_path)


@pytest.mark.slow
def test_a_single_process_whose_workers_lose_their_folder_ends_with_one_line(tmp_path):
    result = run_and_remove(empty_tmpdir, tmp_path, "trainer.devices=1")
    assert result.code == 69
    said = (
        f"echelon: TMPDIR={os.environ['TMPDIR']}: a data worker's folder was removed; exclude echelon-* from clean-ups"
    )
    assert result.err.startswith(said) and result.err.count("\n") == 1
    nobody_left(tmp_path)


@pytest.mark.slow
def test_ranks_whose_folders_are_removed_are_started_again(golden, tmp_path):
    """Their supervisor finds neither their reports nor their heartbeats."""
    result = run_and_remove(empty_tmpdir, tmp_path)
    assert result.code == 0, result.err
    assert len(events(tmp_path)) == 1
    whole(tmp_path, golden)
