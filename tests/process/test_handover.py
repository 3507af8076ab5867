"""Requests to a running job: it takes one over at its checkpoint, and one that it can't take leaves it alone."""

import errno
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.cli import QUICK, ROOT, lines, popen
from support.runs import make

from trainer.config.redact import redact_argument
from trainer.process import handover
from trainer.process.environment import Place

RUN = ["--config-dir", "conf", "recipe=toy", "trainer.allow_targets=[toy_recipe,probe]", *QUICK, "micro_batch=3"]
RUN += ["trainer.run_dir=runs/r", "trainer.checkpoint.every_steps=20", "trainer.max_steps=300"]
RUN += ["trainer.log_every_steps=1", "trainer.validate_every=null"]
TUNED = """# @package _global_
micro_batch: 2
accumulate: null
tuned: {cpu: x, gpu: null, ranks: 1, ranks_per_node: 1, link: none}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "tests" / "toy" / "conf", tmp_path / "conf")
    (tmp_path / "conf" / "tuned").mkdir()
    (tmp_path / "conf" / "tuned" / "mine.yaml").write_text(TUNED)
    return tmp_path


def start(folder: Path, *more: str, **env: str) -> "subprocess.Popen[str]":
    """Start a run, and wait for its first step: an older request is not for this start."""
    process = popen([*RUN, *more], folder, **env)
    deadline, metrics = time.monotonic() + 60, folder / "runs" / "r" / "metrics.jsonl"
    while not (metrics.exists() and "train/loss" in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_job_goes_on_with_the_result_in_the_same_process(devices: int, folder: Path) -> None:
    with start(folder, f"trainer.devices={devices}") as process:
        handover.ask(folder / "runs" / "r", "mine", folder / "conf", ["micro_batch", "accumulate"], devices)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, (out, err)
    assert OmegaConf.load(folder / "runs" / "r" / "config.yaml").micro_batch == 2  # though the command had said 3
    assert [line["step"] for line in lines(folder / "runs" / "r") if "train/loss" in line] == list(range(1, 301))
    assert not list((folder / "runs" / "r").glob("tuned*")) and "finished at step 300" in out


REFUSED = TUNED.replace("micro_batch: 2", "micro_batch: 5")  # does not divide the batch
NO_YAML = TUNED.replace("micro_batch: 2", "micro_batch: [")
CRASHES = f"{TUNED}trainer: {{restarts: 0}}\ncallbacks: {{probe: {{_target_: probe.Probe, trouble: raise}}}}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "content", "reason"),
    [
        (1, REFUSED, "does not divide"),
        (2, NO_YAML, "mine.yaml"),
        (2, CRASHES, "trouble at step"),
    ],
)
def test_a_job_whose_result_fails_at_its_start_goes_on_as_it_was(
    devices: int, content: str, reason: str, folder: Path
) -> None:
    with start(folder, f"trainer.devices={devices}") as process:
        (folder / "conf" / "tuned" / "mine.yaml").write_text(content)
        handover.ask(folder / "runs" / "r", "mine", folder / "conf", ["micro_batch", "accumulate"], devices)
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, (out, err)
    assert reason in err and handover.FAILED in err
    assert OmegaConf.load(folder / "runs" / "r" / "config.yaml").micro_batch == 3
    assert [line["step"] for line in lines(folder / "runs" / "r") if "train/loss" in line] == list(range(1, 301))
    assert [path.name for path in (folder / "runs" / "r").glob("tuned*")] == [handover.REFUSED]


@pytest.mark.slow
@pytest.mark.parametrize("hindrance", ["launcher", "file"])
def test_a_job_that_cannot_take_it_over_goes_on_as_it_is(hindrance: str, folder: Path) -> None:
    env = (
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if hindrance == "launcher" else {}
    )
    with start(folder, **env) as process:
        name = "mine" if hindrance == "launcher" else "other"
        handover.ask(folder / "runs" / "r", name, folder / "conf", ["micro_batch"], 1)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, (out, err)
    assert "is not taken over (" in out and "give +tuned=NAME" in out
    assert OmegaConf.load(folder / "runs" / "r" / "config.yaml").micro_batch == 3
    assert [path.name for path in (folder / "runs" / "r").glob("tuned*")] == [handover.REFUSED]


@pytest.fixture
def asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run in the current folder, with a request."""
    monkeypatch.chdir(folder)
    run_dir = folder / "runs" / "r"
    handover.ask(run_dir, "mine", folder / "conf", ["micro_batch"], 1)
    (run_dir / ".lock").touch()  # as a run leaves it
    return run_dir


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.glob("tuned*"))


def test_a_request_counts_for_one_start_and_for_the_restarts_of_its_ranks(
    asked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (asked / handover.REQUEST).rename(asked / handover.TAKEN)  # the ranks failed before they had stopped
    monkeypatch.setenv("ECHELON_ATTEMPT", "1")
    monkeypatch.setenv("ECHELON_LAUNCHED", str((asked / handover.TAKEN).stat().st_mtime))
    restarted = make()
    restarted.argv = ["recipe=toy"]
    assert restarted.fit()["stopped"] == "signal" and names(asked) == [handover.TAKEN]
    (asked / handover.TAKEN).rename(asked / handover.REQUEST)
    monkeypatch.delenv("ECHELON_ATTEMPT")
    later = make(resume="auto", max_steps=6)
    later.argv = ["recipe=toy", "micro_batch=4"]
    assert later.fit()["steps"] == 6 and names(asked) == [handover.REFUSED]
    said = "runs/r/tuned.json: is older than this start of the run, and is set aside; give +tuned=NAME"
    assert said in capsys.readouterr().out


def test_restarted_ranks_keep_the_newest_request_to_their_own_start(asked: Path) -> None:
    taken, request = asked / handover.TAKEN, asked / handover.REQUEST
    taken.write_text("older")
    os.utime(taken, (50, 50))
    handover.set_aside(asked, 40.0)
    assert names(asked) == [handover.REFUSED, handover.REQUEST] and request.read_text() != "older"
    handover.set_aside(asked, request.stat().st_mtime + 1)  # the first attempt ended before it looked
    assert names(asked) == [handover.REFUSED]


def test_a_result_for_another_number_of_ranks_is_not_taken_over(asked: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not handover.take(asked, Place(0, 2, 0, 2, launcher="echelon"), ["recipe=toy"])
    assert "is not taken over (the result is proven for 1 rank(s), and the run has 2); stop the run" in caplog.text
    assert names(asked) == [handover.REFUSED]


def test_the_command_keeps_what_the_result_does_not_set(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(handover.TRYING, "")
    handover.ask(asked, "mine", asked.parents[1] / "conf", ["trainer.ddp.bucket_mib"], 1)
    words = ["recipe=toy", "+trainer.ddp.bucket_mib=25", "trainer.resume=ckpt/x", "batch=24"]
    assert handover.take(asked, Place(), words) and names(asked) == [handover.TAKEN]
    handover.prepare(asked, words)
    made, handover.command[:] = list(handover.command), []
    end = ["+tuned=mine", f"trainer.run_dir={asked}", "trainer.resume=auto"]
    assert made[3:] == ["recipe=toy", "batch=24", "--config-dir", str(asked.parents[1] / "conf"), *end]
    back = ["recipe=toy", "+trainer.ddp.bucket_mib=25", "batch=24", *end[1:]]
    assert json.loads((asked / handover.TRIED).read_text())["command"] == back
    handover.prepare(asked, words)
    assert not handover.command  # a request counts once


def test_a_run_on_a_full_disk_goes_on(
    asked: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(handover, "write_json", full)
    assert not handover.take(asked, Place(), ["recipe=toy"]) and names(asked) == [handover.REFUSED]
    assert "is not taken over (it can't be written: No space left on device); stop the run" in caplog.text


def test_a_run_that_stopped_for_a_request_tells_why_it_ends(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handover.prepare(asked, ["recipe=toy"])  # stopped for something else
    assert not handover.command and not capsys.readouterr().err
    (asked / handover.TAKEN).mkdir()
    handover.prepare(asked, ["recipe=toy"])
    assert capsys.readouterr().err.endswith("tuned-taken.json: Is a directory; start the run again with +tuned=NAME\n")


def test_a_command_that_hides_a_secret_is_no_way_back(asked: Path, caplog: pytest.LogCaptureFixture) -> None:
    word = redact_argument("recipe.hub_token=null")
    assert not handover.take(asked, Place(), ["recipe=toy", word]) and names(asked) == [handover.REFUSED]
    assert "is not taken over (recipe.hub_token=*** hides a value, which another command would lack)" in caplog.text
