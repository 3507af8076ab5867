"""What a run's config is composed of, and what is told of it."""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from hydra._internal.hydra import Hydra
from omegaconf import OmegaConf
from support.cli import QUICK, ROOT, run
from support.messages import refuses
from support.quick import quick

from trainer.config.check import check
from trainer.config.compose import Job, compose, told_apart
from trainer.config.folders import CONF, config_dirs
from trainer.config.own_hydra import refuse_jobs
from trainer.errors import ConfigError

TOLD = "the recipe's YAML sets this, and optimizer=sgd has"


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], Job]:
    monkeypatch.setattr(sys, "argv", ["main"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # `compose` sets both
    return lambda words: compose(words, [CONF])[0]


@pytest.mark.parametrize(
    ("words", "told"),
    quick(
        [
            ([], []),
            (["optimizer=lamb", "optimizer.lr=1e-3", "optimizer.weight_decay=0"], []),
            (["optimizer=sgd", "optimizer.lr=0.1"], [f"optimizer.weight_decay=0.02: {TOLD} 0.0"]),
            (["optimizer=sgd", "optimizer.weight_decay=0"], [f"optimizer.lr=0.003: {TOLD} 0.1"]),
            (["trainer.devices=2", "optimizer=sgd"], ["optimizer.lr=0.003: ", "optimizer.weight_decay=0.02: "]),
        ],
        3,
    ),
    ids=",".join,
)
def test_a_value_that_the_recipe_sets_for_another_optimizer_is_told(
    words: list[str], told: list[str], tmp_path: Path
) -> None:
    toy = (ROOT / "tests" / "toy" / "conf" / "recipe" / "toy.yaml").read_text()
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "own.yaml").write_text(toy + "optimizer: {lr: 3e-3, weight_decay: 0.02}\n")
    done = run(["--config-dir", "conf", "recipe=own", "trainer.max_steps=1", *QUICK, *words], tmp_path)
    assert done.code == 0, done.err
    warnings = [line for line in (done.out + done.err).splitlines() if "the recipe's YAML" in line]
    assert len(warnings) == len(told), warnings
    for line, start in zip(warnings, told, strict=True):
        assert line.startswith(f"warning: {start}") and "; give optimizer." in line


@pytest.mark.parametrize(
    ("words", "told"),
    quick(
        [
            (["recipe=gpt2_tiny", "optimizer=adafactor"], ["betas=[0.9, 0.95]", "eps=1e-08"]),
            (["recipe=resnet_tiny", "optimizer=adamw"], ["momentum=0.9"]),
            (["recipe=gpt2_medium", "optimizer=adagrad"], ["betas=[0.9, 0.95]"]),
            (["recipe=gpt2", "optimizer=lars"], ["betas=[0.9, 0.95]", "eps=1e-08"]),
            (["recipe=gpt2_large", "optimizer=muon"], []),
            (["recipe=resnet50_lars", "recipe.train=null", "optimizer=sgd"], ["trust_coefficient=0.001"]),
        ],
        2,
    ),
    ids=str,
)
def test_what_the_recipe_sets_is_left_out_where_a_typed_optimizer_can_not_take_it(
    words: list[str], told: list[str], composed
) -> None:
    job = composed(words)
    check(job.config)
    lines = [line for _, line in job.messages if line.endswith("can't take it; it is left out")]
    assert [line.partition(":")[0] for line in lines] == [f"optimizer.{each}" for each in told]


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["optimizer.betas.0=0.8"], r"optimizer\.betas=\[0\.8, 0\.95\]: no such key; there are lr, momentum"),
        (["optimizer.beta=1"], r"optimizer\.beta=1: no such key"),
    ],
    ids=str,
)
def test_what_is_typed_for_another_optimizer_is_refused(words: list[str], refused: str, composed) -> None:
    job = composed(["recipe=gpt2_tiny", "optimizer=sgd", *words])
    with pytest.raises(ConfigError, match=refused):
        check(job.config)


@pytest.mark.parametrize(
    ("argvs", "names"),
    [
        ([["optimizer.lr=1", "batch=8"], ["optimizer.lr=2", "batch=8"]], ["toy-lr-1", "toy-lr-2"]),
        ([["+callbacks=[ema,x]"], ["+callbacks=[]"]], ["toy-callbacks-ema-x", "toy-callbacks"]),
        ([["batch=1"], ["batch=1"]], ["toy", "toy"]),
        ([["a.x=4"], ["a.x=-4"]], ["toy-x-4", "toy-x--4"]),
        ([["~callbacks.progress"], ["recipe=toy"]], ["toy-progress", "toy"]),
        ([["a=../../etc/x y"], ["a=" + "y" * 999]], ["toy-a-..-..-etc-x-y", "toy-a-" + "y" * 114]),
    ],
)
def test_names_of_runs_in_a_multirun(argvs: list[list[str]], names: list[str]) -> None:
    jobs = [Job({}, "toy", argv) for argv in argvs]
    assert [told_apart(job, jobs) for job in jobs] == names


@pytest.mark.parametrize(
    ("words", "batches", "times"),
    quick(
        [
            (["batch=8"], [8], 1),
            (["-m", "batch=8,16"], [8, 16], 1),
            (["batch=8", "hydra.mode=RUN"], [8], 2),
            (["batch=8,16", "++hydra.mode=MULTIRUN"], [8, 16], 2),
            (["--config-dir", "conf", "recipe=swept"], [8, 16], 2),
        ],
        3,
    ),
    ids=str,
)
def test_hydra_composes_a_run_once_unless_its_mode_may_be_set(
    words: list[str], batches: list[int], times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    toy = (ROOT / "conf" / "recipe" / "bert_tiny.yaml").read_text()
    swept = toy + "hydra: {mode: MULTIRUN, sweeper: {params: {batch: '8,16'}}}\n"
    (tmp_path / "conf" / "recipe" / "swept.yaml").write_text(swept)
    monkeypatch.setattr(sys, "argv", ["main"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # `compose` sets both
    with mock.patch.object(Hydra, "compose_config", autospec=True, side_effect=Hydra.compose_config) as composed:
        jobs = compose(["recipe=bert_tiny", *words], [CONF, *config_dirs(words)])
    assert [job.config["batch"] for job in jobs] == batches
    assert composed.call_count == times


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("recipe=[bert_tiny,resnet_tiny]", "a run has one recipe; give recipe=NAME, or 'echelon -m recipe=bert_tiny,"),
        ("+optimizer=[sgd]", "a run has one optimizer; give"),
        ("nccl=[default,sharp]", "a run has one nccl; give"),
        ("callbacks=null", "would change nothing, since the default callbacks stay; '~callbacks.progress' leaves"),
        ("callbacks=[]", "would change nothing"),
        ("~callbacks.ema", "is not in this run; leave this out"),
        ("~callbacks.emma", "is not in this run; did you mean ~callbacks.ema?"),
        ("~trainer", "every run needs these settings; leave this out"),
        ("trainer.max_steps", "has no value; write trainer.max_steps=VALUE, without spaces around ="),
        ("--config-path", "would replace Echelon's configs; --config-dir FOLDER adds yours"),
        ("--config-d", "can't be shortened here; --config-dir FOLDER adds your configs"),
        ("--package", "only chooses what --cfg prints"),
        ("hydra.run.dir=outputs/a", "changes nothing here; give trainer.run_dir=FOLDER"),
        ("hydra.sweep.dir=multirun/a", "changes nothing here; give trainer.run_dir=FOLDER, with -m as in 'trainer.run"),
        ("hydra.job.chdir=true", "changes nothing here; go to the folder before the command"),
        ("hydra.verbose=true", "changes nothing here"),
    ],
)
def test_a_word_that_would_do_something_else_is_refused(word: str, told: str, composed) -> None:
    with pytest.raises(ConfigError) as refused:
        composed([word])
    assert str(refused.value).startswith(f"{word}: {told}")


@pytest.mark.parametrize(
    ("kind", "chosen"),
    quick(
        [("launcher", "by argument"), ("sweeper", "by a file"), ("launcher", "by a file"), ("sweeper", "by argument")],
        2,
    ),
)
def test_plugins_that_would_train_nothing_are_refused(tmp_path, kind, chosen):
    """As of `-m hydra/launcher=joblib`: the plugin would compose configs in its own processes, and exit with 0."""
    (tmp_path / "hydra" / kind).mkdir(parents=True)
    (tmp_path / "hydra" / kind / "farm.yaml").write_text("_target_: farm.Farm\n")
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        f"# @package _global_\ndefaults: [bert_tiny, {{override /hydra/{kind}: farm}}]\n"
    )
    words = [f"hydra/{kind}=farm"] if chosen == "by argument" else ["recipe=mine"]
    done = run(["-m", "--config-dir", ".", "trainer.max_steps=1,2", *words], tmp_path)
    assert (done.code, done.out) == (78, "")
    assert done.err == (
        f"echelon: hydra/{kind}=farm: this plugin would train nothing here; leave it out: -m runs one value after the "
        "other, and trainer.devices=N starts N ranks\n"
    )


@pytest.mark.parametrize("kind", ["launcher", "sweeper"])
def test_a_target_of_a_plugin_is_named(kind):
    basic = {"_target_": "hydra._internal.core_plugins.basic_other.Basic"}
    settings = {"launcher": basic, "sweeper": basic, kind: {"_target_": "farm.Farm"}}
    choices = {"hydra/launcher": "basic", "hydra/sweeper": "basic"}
    with pytest.raises(ConfigError, match=rf"^hydra\.{kind}\._target_=farm\.Farm: this plugin would train nothing"):
        refuse_jobs(OmegaConf.create({**settings, "runtime": {"choices": choices}}))


def test_hydra_plugins_of_the_working_folder_are_not_loaded(tmp_path):
    """Hydra runs all modules of hydra_plugins, and the folder may be a stranger's."""
    (tmp_path / "hydra_plugins" / "evil").mkdir(parents=True)
    (tmp_path / "hydra_plugins" / "evil" / "__init__.py").write_text("open('ran', 'w').close()\n")
    done = run(["recipe=bert_tiny", "trainer.max_steps=x"], tmp_path)
    assert done.code == 78 and "trainer.max_steps=x" in done.err
    assert not (tmp_path / "ran").exists()


def test_bytes_that_the_locale_does_not_read_are_named(monkeypatch):
    """In a C locale the shell's UTF-8 arrives as surrogates, which no quotes help."""
    monkeypatch.setattr(sys, "argv", ["echelon"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # `compose` sets it
    with refuses("trainer.run_dir=runs/gr??n", "bytes", "LC_ALL=C.UTF-8"):
        compose(["trainer.run_dir=runs/gr\udcc3\udcb6n"], [CONF])


def test_a_folder_of_hydras_in_a_file_is_refused_before_it_is_made(tmp_path, composed):
    Path("recipe").mkdir()
    Path("recipe/mine.yaml").write_text("# @package _global_\ndefaults: [bert_tiny]\nhydra: {run: {dir: out}}\n")
    with refuses("hydra.run.dir=out", "trainer.run_dir=FOLDER"):
        compose(["--config-dir", ".", "recipe=mine"], [CONF, Path()])
    assert not Path("out").exists()


def test_the_arguments_that_loggers_store_have_no_secrets(monkeypatch):
    """wandb keeps `sys.argv` in its metadata."""
    monkeypatch.setattr(sys, "argv", ["echelon"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # `compose` sets it
    jobs = compose(["+recipe.api_key=s3cr3t", "+recipe.url='https://u:s3cr3t@h/x'"], [CONF])
    assert jobs[0].config["recipe"]["api_key"] == "s3cr3t" and "s3cr3t" not in " ".join(sys.argv)
    assert any("api_key=***" in word for word in sys.argv)
