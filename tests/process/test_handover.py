"""Requests to a running job: it takes one over at its checkpoint, and one that it can't take leaves it alone."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.cli import QUICK, ROOT, lines, popen

from trainer.process import handover

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
    """Start a run, and wait for its folder."""
    process = popen([*RUN, *more], folder, **env)
    deadline = time.monotonic() + 60
    while not (folder / "runs" / "r" / "metrics.jsonl").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_job_goes_on_with_the_result_in_the_same_process(devices: int, folder: Path) -> None:
    with start(folder, f"trainer.devices={devices}") as process:
        handover.ask(folder / "runs" / "r", "mine", folder / "conf", ["micro_batch", "accumulate"])
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
        handover.ask(folder / "runs" / "r", "mine", folder / "conf", ["micro_batch", "accumulate"])
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
        handover.ask(folder / "runs" / "r", name, folder / "conf", ["micro_batch"])
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, (out, err)
    assert "is not taken over (" in out and "give +tuned=NAME" in out
    assert OmegaConf.load(folder / "runs" / "r" / "config.yaml").micro_batch == 3
    assert [path.name for path in (folder / "runs" / "r").glob("tuned*")] == [handover.REFUSED]


def test_the_command_keeps_what_the_result_does_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(handover.TRYING, "")
    handover.ask(tmp_path, "mine", tmp_path, ["trainer.ddp.bucket_mib"])
    os.rename(tmp_path / handover.REQUEST, tmp_path / handover.TAKEN)
    words = ["recipe=toy", "+trainer.ddp.bucket_mib=25", "trainer.resume=ckpt/x", "batch=24"]
    handover.prepare(tmp_path, words)
    made, handover.command[:] = list(handover.command), []
    end = ["+tuned=mine", f"trainer.run_dir={tmp_path}", "trainer.resume=auto"]
    assert made[3:] == ["recipe=toy", "batch=24", "--config-dir", str(tmp_path.resolve()), *end]
    back = ["recipe=toy", "+trainer.ddp.bucket_mib=25", "batch=24", *end[1:]]
    assert json.loads((tmp_path / handover.TRIED).read_text())["command"] == back
    handover.prepare(tmp_path, words)
    assert not handover.command  # a request counts once
