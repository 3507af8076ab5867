"""Rolling out: which results a running job is asked to take over, and which ones only a user may choose."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.checkpoints import put
from support.cli import ROOT

from trainer.checkpoint.lock import CHECKPOINTED
from trainer.config.compose import CONF, compose
from trainer.errors import ConfigError
from trainer.process import handover
from trainer.tools.cost_model.workload import Choice
from trainer.tools.tune import apply
from trainer.tools.tune.apply import find_run, hand_over
from trainer.tools.tune.configs import node

TOY = ["--config-dir", str(ROOT / "tests" / "toy" / "conf"), "recipe=toy"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("sys.argv", ["tune"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    config: Any = compose(TOY, [CONF, ROOT / "tests" / "toy" / "conf"])[0].config
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    return tmp_path


def test_settings_and_layouts_are_handed_over(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "is_running", lambda run_dir: True)
    choice = Choice({"shard": {"stage": 1}}, {"micro_batch": 2, "accumulate": None})
    assert hand_over(run, choice, 2, "mine", run) == f"{run} takes it over at its next checkpoint"
    asked = json.loads((run / handover.REQUEST).read_text())
    assert asked == {"name": "mine", "folder": str(run.resolve()), "keys": ["micro_batch", "accumulate"], "ranks": 2}


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (Choice({"overlap": {}}, {}), "a resume refuses new callbacks with state (overlap)"),
        (Choice({}, {"micro_batch": 5, "accumulate": None}), "it would refuse the result (batch=12: does not divide"),
    ],
)
def test_what_a_resume_refuses_is_left_to_the_user(
    choice: Choice, reason: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "is_running", lambda run_dir: True)
    assert f"{run} goes on as it is: {reason}" in hand_over(run, choice, 2, "mine", run)
    assert not (run / handover.REQUEST).exists()


def test_a_run_has_to_be_named_and_to_be_there(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"tune\.apply=true: no run is named; give "):
        find_run({"trainer": {"run_dir": None}})
    with pytest.raises(ConfigError, match=r"run_dir=.*odd: holds no run"):
        find_run({"trainer": {"run_dir": str(run / "odd")}})


@contextmanager
def running(run: Path) -> Iterator[None]:
    """Hold the run's lock in another process, as its job does."""
    code = "import sys; from pathlib import Path; from trainer.checkpoint.lock import lock; lock(Path(sys.argv[1]));"
    code += "print(flush=True); sys.stdin.read()"
    with Popen([sys.executable, "-c", code, str(run)], stdin=PIPE, stdout=PIPE, cwd=ROOT) as job:
        assert job.stdout is not None and job.stdout.readline()
        yield
        job.communicate(timeout=20)


def test_a_run_has_to_train_what_was_tuned_and_to_be_running(run: Path) -> None:
    config: Any = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    config["trainer"] |= {"run_dir": str(run), "max_steps": 7}
    del config["callbacks"]["progress"]
    choice = Choice({}, {"micro_batch": 2, "accumulate": None})
    with pytest.raises(ConfigError, match=r"trainer\.run_dir=.*: no process writes this run"):
        find_run(config)
    assert hand_over(run, choice, 2, "mine", run) == f"{run} has ended; go on with +tuned=mine"
    with running(run):
        put(run / "ckpt", 7, world=8)
        (run / CHECKPOINTED).write_text(str(run / "ckpt"))
        assert "goes on as it is: its newest checkpoint is of 8 rank(s), and the result is proven for 2" in hand_over(
            run, choice, 2, "mine", run
        )
        put(run / "ckpt", 8, world=2)
        assert find_run(config) == run  # such settings change nothing that was proven
        with pytest.raises(ConfigError, match=r"recipe\.samples=5: .* has \d+, and a result is proven for one config"):
            find_run({**config, "recipe": config["recipe"] | {"samples": 5}})
        with pytest.raises(ConfigError, match=r"\+callbacks=\['ema'\]: .* has \[\], and a result"):
            find_run({**config, "callbacks": config["callbacks"] | {"ema": node("ema")}})
        assert hand_over(run, choice, 2, "mine", run) == f"{run} takes it over at its next checkpoint"
