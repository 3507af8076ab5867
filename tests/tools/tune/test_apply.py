"""Rolling out: which results a running job is asked to take over, and which ones only a user may choose."""

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.checkpoints import put
from support.cli import ROOT
from support.configs import toy_config

from trainer.checkpoint.lock import CHECKPOINTED
from trainer.config.redact import redact_argument
from trainer.errors import ConfigError
from trainer.process import handover
from trainer.tools.cost_model.workload import Choice
from trainer.tools.tune import apply
from trainer.tools.tune.apply import find_run, hand_over
from trainer.tools.tune.configs import node

TOY = ["--config-dir", str(ROOT / "tests" / "toy" / "conf"), "recipe=toy"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(toy_config())))
    return tmp_path


def config_of(run: Path) -> dict[str, Any]:
    """The config of a search for this run."""
    config: Any = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    return {**config, "trainer": {**config["trainer"], "run_dir": str(run)}}


def test_settings_and_layouts_are_handed_over(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "is_running", lambda run_dir: True)
    choice = Choice({"shard": {"stage": 1}}, {"micro_batch": 2, "accumulate": None})
    assert (
        hand_over(config_of(run), TOY, choice, 2, "mine", run)
        == f"{run} takes it over at its next checkpoint, unless it ends before"
    )
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
    assert f"{run} goes on as it is: {reason}" in hand_over(config_of(run), TOY, choice, 2, "mine", run)
    assert not (run / handover.REQUEST).exists()


def test_a_run_has_to_be_named_and_to_be_there(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"tune\.apply=true: no run is named; give "):
        find_run({"trainer": {"run_dir": None}}, TOY)
    with pytest.raises(ConfigError, match=r"run_dir=.*odd: holds no run"):
        find_run({"trainer": {"run_dir": str(run / "odd")}}, TOY)


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
    config = config_of(run)
    config["trainer"] |= {"max_steps": 7}
    del config["callbacks"]["progress"]
    choice = Choice({}, {"micro_batch": 2, "accumulate": None})
    with pytest.raises(ConfigError, match=r"trainer\.run_dir=.*: no process writes this run"):
        find_run(config, TOY)
    assert hand_over(config, TOY, choice, 2, "mine", run) == f"{run} has ended; go on with +tuned=mine"
    with running(run):
        put(run / "ckpt", 7, world=8)
        (run / CHECKPOINTED).write_text(str(run / "ckpt"))
        assert "goes on as it is: its newest checkpoint is of 8 rank(s), and the result is proven for 2" in hand_over(
            config, TOY, choice, 2, "mine", run
        )
        put(run / "ckpt", 8, world=2)
        assert find_run(config, TOY)[0] == run  # such settings change nothing that was proven
        with pytest.raises(ConfigError, match=r"recipe\.samples=5: .* has \d+, and a result is proven for one config"):
            find_run({**config, "recipe": config["recipe"] | {"samples": 5}}, TOY)
        with pytest.raises(ConfigError, match=r"\+callbacks=\['ema'\]: .* has \[\], and a result"):
            find_run({**config, "callbacks": config["callbacks"] | {"ema": node("ema")}}, TOY)
        assert (
            hand_over(config, TOY, choice, 2, "mine", run)
            == f"{run} takes it over at its next checkpoint, unless it ends before"
        )


def test_a_job_that_was_started_anew_during_the_search_is_left_alone(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "is_running", lambda run_dir: True)
    config = config_of(run)
    anew = OmegaConf.create({**config, "optimizer": {**config["optimizer"], "lr": 0.5}})
    (run / "config.yaml").write_text(OmegaConf.to_yaml(anew))
    told = hand_over(config, TOY, Choice({}, {"micro_batch": 2, "accumulate": None}), 2, "mine", run)
    assert told.startswith(f"{run} goes on as it is: optimizer.lr=0.001: {run} has 0.5")
    assert not (run / handover.REQUEST).exists()


@pytest.mark.parametrize("value", [None, "***"])
def test_a_job_with_a_hidden_value_is_refused_before_the_search(
    value: str | None, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "is_running", lambda run_dir: True)
    config = config_of(run)
    config["recipe"] |= {"hub_token": value}  # a command shows null as stars, too
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    with pytest.raises(ConfigError, match=r"^recipe\.hub_token=\*\*\*: is hidden, .*; leave tune\.apply out, and"):
        find_run(config, [*TOY, *([] if value else [redact_argument("+recipe.hub_token=null")])])


@pytest.mark.parametrize(
    ("saving", "is_asked"),
    [
        ({"every_steps": None}, False),
        ({"every_steps": None, "every": "auto"}, True),
        ({"every_steps": None, "every_minutes": 30.0}, True),
        ({"every_steps": None, "keep_best": "val/loss"}, True),
        ({"every_steps": 4}, True),
        ({"every_steps": 5}, False),  # the next one would be the last step's, at which no job goes on
    ],
)
def test_a_job_without_a_further_checkpoint_is_not_asked(
    saving: dict[str, Any], is_asked: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "is_running", lambda run_dir: True)
    config = config_of(run)
    config["trainer"]["checkpoint"] |= {"every": None, "every_minutes": None, "keep_best": None, **saving}
    config["trainer"]["max_steps"] = 10
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    put(run / "ckpt", 5, world=2)
    (run / CHECKPOINTED).write_text(str(run / "ckpt"))
    with (
        nullcontext() if is_asked else pytest.raises(ConfigError, match=r"run_dir=.*: this job makes no further check")
    ):
        find_run(config, TOY)


@pytest.mark.parametrize("text", ["a: [", "", "- 1", "recipe: {}", None])
def test_a_config_that_cannot_be_read_is_one_line(text: str | None, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(run)
    (run / "config.yaml").write_text(text or "")
    if text is None:
        monkeypatch.setattr("io.open", refuse)
    with pytest.raises(ConfigError, match=r"^trainer\.run_dir=.*: config\.yaml can't be read \(.*\); leave") as caught:
        find_run(config, TOY)
    monkeypatch.undo()
    assert "\n" not in str(caught.value) and (text is not None or "(Permission denied)" in str(caught.value))


def refuse(file: object, *_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
