"""`launch`: results, output, failures and interrupts of functions on several ranks. In a notebook: tests/docs."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.cli import Result, environment, popen, run
from support.faults import alive
from support.messages import refuses
from support.quick import quick

from trainer.checkpoint.locate import checkpoints
from trainer.errors import RankError, exit_code, message
from trainer.launch.function import launch, pack


def launched(folder: Path, name: str, devices: int, *args: int) -> Result:
    return run([name, str(devices), *map(str, args)], folder, "launched")


def test_a_trainer_on_two_ranks_returns_what_rank_0_has(tmp_path):
    """It finds its place, fits twice, and evaluates after its ranks have parted twice."""
    done = launched(tmp_path, "trains", 2, 3)
    *printed, result = done.out.splitlines()
    assert done.code == 0 and "caf\N{LATIN SMALL LETTER E WITH ACUTE} of rank 0" in printed, done
    assert "of rank 1" not in done.out and any("2 rank(s)" in line or "finished at step" in line for line in printed)
    found = json.loads(result)
    assert (found["ranks"], found["steps"], list(found["metrics"])) == (2, [3, 5], ["val/loss"])
    summary = json.loads((tmp_path / "runs" / "r" / "summary.json").read_text())
    assert found["metrics"]["val/loss"] == pytest.approx(summary["val/loss"], rel=1e-6)


@pytest.mark.slow
def test_the_output_of_a_script_may_be_a_file(tmp_path):
    """The ranks' output is a pipe in its place."""
    command = [sys.executable, "-c", "import launched; launched.main()", "returns_tensors", "1"]
    with (tmp_path / "log").open("w") as file:
        subprocess.run(command, cwd=tmp_path, env=environment(), stdout=file, stderr=file, check=False, timeout=60)
    assert (tmp_path / "log").read_text().endswith('{"t": "tensor([0., 1., 2.])", "argument": "1"}\n')


def test_tensors_come_back(tmp_path):
    assert launched(tmp_path, "returns_tensors", 1).out == '{"t": "tensor([0., 1., 2.])", "argument": "1"}\n'


def test_a_tool_ends_with_the_words_and_the_code_of_the_rank_that_failed():
    error = RankError("rank 1 was killed by SIGKILL\nlast words", 137)
    assert str(error) == "launch: rank 1 was killed by SIGKILL\nlast words"
    assert (message(error), exit_code(error)) == ("echelon: rank 1 was killed by SIGKILL\nlast words", 137)


@pytest.mark.parametrize(
    "name, said",
    quick(
        [
            ("refuses", ["DataError: corpus.txt: is missing; restore it"]),
            ("fails", ["RankError: launch: rank 1 failed first:", "ZeroDivisionError: trouble"]),
            (
                "fails_in_lockstep",
                ["RankError: launch: rank 1 failed first:", "OSError: no more memory on this GPU"],
            ),
            ("dies", ["RankError: launch: rank 1 was killed by SIGKILL", "last words"]),
            (
                "returns_a_lock",
                ["ConfigError: launch: the function returned a lock, which can't be sent back (cannot pickle"],
            ),
        ],
        3,
    ),
)
def test_a_failed_rank_ends_the_others_and_tells_why(tmp_path, name, said):
    began = time.monotonic()
    done = launched(tmp_path, name, 2)
    assert done.code == 0 and all(text in done.out for text in said), done
    assert done.out.count("Traceback") == ("fails" in name) and "its log" not in done.out
    assert time.monotonic() - began < 60  # not the 600 s of the other rank


def interrupted(folder: Path, name: str, file: str, times: int = 1) -> str:
    """Interrupt once the file is there, and return what is printed."""
    with popen([name, "2"], folder, "launched") as process:
        timer = threading.Timer(60, process.kill)
        timer.start()
        while process.poll() is None and not (folder / file).exists():
            time.sleep(0.02)
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.5 * (times > 1))
        out, err = process.communicate(timeout=60)
        timer.cancel()
    assert process.returncode == 0, (out, err)
    return out


def test_an_interrupt_lets_a_trainer_write_its_checkpoint(tmp_path):
    out = interrupted(tmp_path, "endless", "stepping")
    assert out.endswith("interrupted\n") and len(checkpoints(tmp_path / "ckpt" / "r")) == 1, out
    assert json.loads((tmp_path / "runs" / "r" / "summary.json").read_text())["stopped"] == "signal"


def test_an_interrupt_ends_ranks_that_do_not_train(tmp_path):
    assert interrupted(tmp_path, "pids", "pid-1").endswith("interrupted\n")
    pids = [file.read_text() for file in tmp_path.glob("pid-*")]
    assert not [pid for pid in pids if pid and alive(int(pid))]  # a rank may have ended before it wrote


def test_a_rank_launches_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refuses("launch", "torchrun", "function"):
        launch(print)


def test_what_can_not_be_sent_is_refused(monkeypatch):
    lock = threading.Lock()
    with refuses("launch", "argument"):
        launch(lambda: lock)
    with refuses("launch", "devices=0", "1"):
        launch(print, devices=0)
    with refuses("launch", "devices=two"):
        launch(print, devices="two")


def test_cloudpickle_is_needed_for_functions_of_a_script_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert b"dumps" in pack(json.dumps, (1,))
    with refuses("launch", "'cloudpickle>=3,<4'"):
        pack(lambda: 0, ())
