"""Rolling out: the command that resumes a job with a result, and the jobs for which there is none."""

import errno
import os
import shlex
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
from support.configs import toy_config
from support.messages import refuses

from trainer.checkpoint.locate import CHECKPOINTED
from trainer.cost.workload import Choice
from trainer.errors import ConfigError
from trainer.process.calling import echelon
from trainer.tools.cost_model.read import defaults
from trainer.tools.tune.apply import refuse_other_job, switch


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(toy_config())))
    return tmp_path


def config_of(run: Path) -> dict[str, Any]:
    """The config of a search for this run."""
    config: Any = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    return {**config, "trainer": {**config["trainer"], "run_dir": str(run)}}


def words_of(run: Path, choice: Choice) -> list[str]:
    """The arguments of the command that resumes the job."""
    stop, _, command = switch(config_of(run), choice, 2, "mine", run).partition(", then: ")
    assert stop == f"stop {run} by SIGTERM"
    return shlex.split(command)[len(echelon()) :]


def test_the_command_has_the_result_and_goes_on_with_the_job(run: Path) -> None:
    choice = Choice({"shard": {"stage": 1}}, {"micro_batch": 2, "accumulate": None})
    assert words_of(run, choice) == ["resume", str(run), "--config-dir", str(run.resolve()), "+tuned=mine"]
    assert words_of(run, Choice({"overlap": {}}, {}))[-1] == "trainer.accept=[callbacks]"  # it has state
    assert [path.name for path in run.iterdir()] == ["config.yaml"]


def test_a_config_that_no_run_of_the_user_wrote_allows_no_package(run: Path, monkeypatch) -> None:
    """A neighbour may have changed it in the folder of the running job."""
    (run / "stranger.py").write_text("from pathlib import Path\nPath('mark').mkdir()\nclass X: pass\n")
    monkeypatch.chdir(run)
    monkeypatch.syspath_prepend(run)
    config, odd = config_of(run), OmegaConf.load("config.yaml")
    odd.trainer.allow_targets.append("stranger")
    odd.callbacks.x = {"_target_": "stranger.X"}
    OmegaConf.save(odd, "config.yaml")
    with refuses("callbacks.x._target_=stranger.X", "'trainer.allow_targets=[toy_recipe,stranger]'"):
        refuse_other_job(config)
    assert not Path("mark").exists()


def test_what_a_resume_refuses_has_no_command(run: Path) -> None:
    choice = Choice({}, {"micro_batch": 5, "accumulate": None})
    said = switch(config_of(run), choice, 2, "mine", run)
    assert said.startswith(f"{run} keeps its config: a resume would refuse the result (batch=12: does not divide")


def test_a_run_has_to_be_named_and_to_be_there(run: Path) -> None:
    with refuses("tune.apply=true", "trainer.run_dir=runs/NAME"):
        refuse_other_job({"trainer": {"run_dir": None}})
    with pytest.raises(ConfigError, match=r"run_dir=.*odd: holds no run"):
        refuse_other_job({"trainer": {"run_dir": str(run / "odd"), "allow_targets": []}})


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
    with refuses("trainer.run_dir", "process", "+tuned=NAME"):
        refuse_other_job(config)
    with running(run):
        put(run / "ckpt", 7, world=8)
        (run / CHECKPOINTED).write_text(str(run / "ckpt"))
        assert "its newest checkpoint is of 8 rank(s), and the result of 2" in switch(config, choice, 2, "x", run)
        put(run / "ckpt", 8, world=2)
        refuse_other_job(config)  # such settings change nothing that was proven
        with refuses("recipe.samples=5", "tune.apply=true"):
            refuse_other_job({**config, "recipe": config["recipe"] | {"samples": 5}})
        with refuses("+callbacks=['ema']", "[]", "tune.apply=true"):
            refuse_other_job({**config, "callbacks": config["callbacks"] | {"ema": defaults("ema")}})


@pytest.mark.parametrize("text", ["a: [", "", "- 1", "recipe: {}", None])
def test_a_config_that_cannot_be_read_is_one_line(text: str | None, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(run)
    (run / "config.yaml").write_text(text or "")
    if text is None:
        monkeypatch.setattr("io.open", refuse)
    with refuses("trainer.run_dir", "config.yaml", "tune.apply") as caught:
        refuse_other_job(config)
    monkeypatch.undo()
    assert "\n" not in str(caught.value) and (text is not None or "(Permission denied)" in str(caught.value))


def refuse(file: object, *_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
