"""`resume RUN` is the run's own command once more, with what is typed on top."""

import csv
import json
import logging
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.cli import Result, run, toy, weights
from support.messages import refuses

from trainer.config.compose import Job
from trainer.config.options import DataOptions
from trainer.config.signature import NAME, sign
from trainer.errors import ConfigError
from trainer.tools import resume as tool
from trainer.tools.resume import composed

WORDS = ["trainer.max_steps=8", "trainer.run_dir=runs/r", "optimizer.lr=0.003", "recipe.width=8", "+callbacks=[ema]"]
STOP = ["+callbacks=[probe]", "callbacks.probe.trouble=SIGTERM", "callbacks.probe.step=4"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """The folder in which a run with some settings of its own was stopped after 4 steps."""
    cwd = tmp_path_factory.mktemp("begun")
    done = toy([*WORDS, *STOP], cwd)
    assert done.code == 75, done.err
    return cwd


@pytest.fixture
def here(begun, tmp_path, monkeypatch) -> Path:
    """A copy of it, as the current folder."""
    for file in begun.rglob("*"):
        if file.is_file() and not file.is_symlink():
            (tmp_path / file.relative_to(begun)).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file.relative_to(begun)).write_bytes(file.read_bytes())
    sign(tmp_path / "runs/r/config.yaml")  # as the run would have here
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # as `compose` sets it
    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    return tmp_path


def resume(cwd: Path, *words: str) -> Result:
    return run(["runs/r", *words], cwd, "trainer.tools.resume")


def config(cwd: Path, *words: str) -> Any:
    (job,) = composed(Path("runs/r"), list(words))
    return job.config


def test_it_goes_on_with_the_stored_config(here, tmp_path_factory):
    """The weights are those of the run that nothing stopped, bit for bit; overrides are stored for the next resume."""
    done = resume(here, "~callbacks.probe")
    assert done.code == 0 and "resumed from ckpt/r/step-00000004 at step 4, sample 48" in done.out, done.err
    whole = tmp_path_factory.mktemp("whole")
    assert toy(WORDS, whole).code == 0
    assert weights("r", here, 8) == weights("r", whole, 8)
    assert [path.name for path in (here / "runs").iterdir()] == ["r"]
    assert run(["resume", "runs/r", "trainer.max_steps=9"], here).code == 0  # as a word of the command
    assert json.loads((here / "runs/r/summary.json").read_text())["steps"] == 9
    stored = OmegaConf.load(here / "runs/r/config.yaml")
    assert (stored.trainer.max_steps, stored.recipe.width, stored.optimizer.lr) == (9, 8, 0.003)
    assert "probe" not in stored.callbacks


def test_what_a_resume_refuses_is_told_as_ever(here):
    done = resume(here, "trainer.seed=7")
    assert (done.code, done.err) == (
        78,
        "echelon: trainer.resume: seed was 0 in the checkpoint and is 7; set this back, or accept it by "
        "'trainer.accept=[seed]'\n",
    )


def test_lines_about_the_settings_reach_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    job, told = Job({}, "", ["a=1"], [(logging.WARNING, "a is told")]), list[Any]()
    monkeypatch.setattr(tool, "composed", lambda *_: [job])
    monkeypatch.setattr(tool, "check", lambda _: None)
    monkeypatch.setattr(tool, "run", lambda *given: told.append(given) or 0)
    assert tool.resume(Path("r"), []) == 0
    assert told == [({}, "r", ["resume", "r", "a=1"], job.messages)]


@pytest.mark.parametrize("odd", ["unsigned", "changed"])
def test_a_config_that_no_run_of_the_user_wrote_allows_nothing(here, odd):
    """What it would allow is named, and comes from the command: packages, programs, a folder in which files go."""
    file = here / "runs/r/config.yaml"
    if odd == "unsigned":
        file.with_name(NAME).unlink()
    stored = OmegaConf.load(file)
    stored.data.allow_pipe, stored.data.cache_dir, stored.data.cache_gb = True, str(here / "home"), 0.001
    OmegaConf.save(stored, file)
    done = resume(here)
    assert (done.code, done.err) == (
        78,
        "echelon: RUN=runs/r: no run of yours has written this config.yaml here, or it was changed since, so it can't "
        "set trainer.allow_targets, data.allow_pipe, data.cache_dir, data.cache_gb; if you trust it, add "
        f"'trainer.allow_targets=[toy_recipe,probe]' 'data.allow_pipe=true' 'data.cache_dir={here / 'home'}' "
        "'data.cache_gb=0.001'\n",
    )
    given = [
        "trainer.allow_targets=[toy_recipe]",
        "data.allow_pipe=false",
        '+data.cache_dir="~/mine"',
        "data.cache_gb=2",
    ]
    assert config(here, *given)["data"]["cache_dir"] == "~/mine"
    with refuses("RUN=runs/r", "data.allow_pipe", "'data.allow_pipe=true'"):
        config(here, given[0], *given[2:])


def test_a_config_that_composes_itself_is_refused(here):
    """Else a list of defaults would lead to YAML of a stranger's folder, which may allow what this config may not."""
    file = here / "runs/r/config.yaml"
    stored = OmegaConf.load(file)
    for key in ("defaults", "hydra"):
        OmegaConf.save(OmegaConf.merge(stored, {key: []}), file)
        with pytest.raises(ConfigError, match=rf"^RUN=runs/r: config\.yaml can't be read \(has {key}, which no run"):
            config(here)


def test_a_strangers_config_has_the_users_own_cache(here):
    file = here / "runs/r/config.yaml"
    stored = OmegaConf.load(file)
    del stored.trainer.allow_targets, stored.data.cache_dir, stored.data.cache_gb
    OmegaConf.save(stored, file)
    found = config(here)
    assert found["trainer"]["allow_targets"] == [] and found["data"]["cache_dir"] == DataOptions.cache_dir


@pytest.mark.slow
def test_overrides_are_those_of_the_command(here):
    stored = config(here)
    assert stored["trainer"] | {"run_dir": "runs/r", "resume": "auto"} == stored["trainer"]
    assert stored["recipe"]["width"] == 8 and stored["callbacks"]["ema"]["decay"] == 0.999
    changed = config(here, "optimizer=sgd", "optimizer.lr=0.5", "+callbacks=[early_stop]", "~callbacks.ema")
    assert changed["optimizer"] == {
        "_target_": "trainer.optim.factories.sgd", "_partial_": True, "lr": 0.5, "momentum": 0.9, "nesterov": False,
        "weight_decay": 0.0, "groups": None,
    }  # fmt: skip
    assert "early_stop" in changed["callbacks"] and "ema" not in changed["callbacks"]
    again = config(here, "callbacks.ema.decay=0.5", "+callbacks=[ema,progress]")
    assert again["callbacks"]["ema"]["decay"] == 0.5 and "tensorboard" not in again["callbacks"]


@pytest.mark.parametrize(
    "words, told",
    [
        (["recipe=bert_tiny"], "recipe=bert_tiny: a resume keeps its recipe; leave this out"),
        (["-m", "optimizer.lr=1,2"], "-m: a resume continues one run; leave -m out"),
        (["trainer.run_dir=runs/s"], "trainer.run_dir=runs/s: a resume continues in the run's own folder runs/r"),
        (["trainer.run_dir=null"], "trainer.run_dir=null: a resume continues in the run's own folder runs/r; leave"),
        (["optimizer=sdg"], "optimizer=sdg: there is no such optimizer; did you mean sgd"),
    ],
)
def test_overrides_that_are_refused(here, words, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        composed(Path("runs/r"), words)


def test_the_folder_of_checkpoints_is_no_run(here):
    with refuses("RUN=ckpt/r", "runs/r"):
        composed(Path("ckpt/r"), [])


def test_keys_are_checked(here):
    done = resume(here, "trainer.max_stesp=8")
    assert done.code == 78 and done.err.count("\n") == 1
    assert done.err.startswith("echelon: trainer.max_stesp=8: no such key; did you mean max_steps")


@pytest.mark.parametrize(
    "content, told",
    [
        (None, "RUN=runs/r: has no config.yaml; give the folder of a run"),
        ("a: [", "RUN=runs/r: config.yaml can't be read (while parsing"),
        ("- 1", "RUN=runs/r: config.yaml can't be read ("),
        (
            "recipe: {a: 1}\ncallbacks: {}\noptimizer: {}\n",
            "config.yaml can't be read (has no schedule, trainer, data);",
        ),
    ],
)
def test_a_folder_that_is_no_run(tmp_path, content, told):
    with pytest.raises(ConfigError, match="RUN=runs/r: is no folder; give the folder of a run, as in runs/NAME"):
        composed(Path("runs/r"), [])
    Path("runs/r").mkdir(parents=True)
    if content:
        Path("runs/r/config.yaml").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(told)):
        composed(Path("runs/r"), [])


def test_a_run_made_in_python(tmp_path):
    Path("runs/r").mkdir(parents=True)
    Path("runs/r/.lock").write_text("process 1 on host")  # as a run does
    with refuses("RUN=runs/r", "command"):
        tool.resume(Path("runs/r"), [])
    Path("runs/r/metrics.jsonl").touch()
    told = "RUN=runs/r: this run has no config.yaml, which a Trainer made in Python does not write; resume in Python, "
    with pytest.raises(ConfigError, match=re.escape(f"{told}with Options(run_dir='runs/r', resume='auto')")):
        composed(Path("runs/r"), [])


def test_a_secret_that_was_not_stored_is_asked_for(here):
    file = here / "runs/r/config.yaml"
    file.write_text(file.read_text().replace("width: 8", "width: 8\n  hub_token: '***'"))
    sign(file)
    done = resume(here)
    assert (done.code, done.err) == (
        78,
        "echelon: recipe.hub_token=***: is a secret that was not printed; give its value\n",
    )


def test_a_stopped_run_names_the_command(here):
    """The command that goes on with a resumed run is that of the resume."""
    done = resume(here, "callbacks.probe.step=6")
    assert done.code == 75, (done.out, done.err)
    (command,) = re.findall("^resume with (.*)$", done.out, re.MULTILINE)
    words = shlex.split(command)
    words = words[words.index("resume") :]
    assert words == ["resume", "runs/r", "callbacks.probe.step=6", "trainer.resume=ckpt/r"]
    assert re.search("^or with     .* resume runs/r$", done.out, re.MULTILINE)
    again = run([*words, "callbacks.probe.step=7"], here)
    assert again.code == 75 and "ckpt/r/step-00000006 at step 6" in again.out, again.err


@pytest.mark.slow
def test_two_ranks(tmp_path):
    """They go on as two. Rank 0 alone writes: each step has one row."""
    done = toy(["trainer.devices=2", "trainer.max_steps=4", "trainer.run_dir=runs/r", "+callbacks=[csv]"], tmp_path)
    assert done.code == 0, done.err
    done = resume(tmp_path, "trainer.max_steps=6")
    assert done.code == 0 and "2 rank(s) on cpu" in done.out, done.err
    with (tmp_path / "runs/r/metrics.csv").open(newline="") as file:
        rows = [(row["step"], bool(row["val/loss"])) for row in csv.DictReader(file)]
    assert rows == [
        (str(n), validated) for n in range(1, 7) for validated in ((False, True) if n in (4, 5, 6) else (False,))
    ]
