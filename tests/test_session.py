"""A single process: its crash is on the disk, its machine in what a resume compares."""

import json

import pytest
from omegaconf import OmegaConf
from support.cli import lines, toy
from support.configs import toy_config
from toy_recipe import Toy

from trainer.checkpoint.compare import differences
from trainer.comm.nccl import NCCLOptions
from trainer.comm.ranks import Ranks
from trainer.errors import ConfigError
from trainer.process.environment import Place
from trainer.session import OF_RECIPE, arithmetic, build_components, build_or_own, describe, save_config
from trainer.trainer import Trainer

PROBE = ["+callbacks=[probe]", "trainer.run_dir=runs/r", "callbacks.probe.step=3"]


def test_a_crash_is_in_the_log_and_in_the_summary_and_a_resume_goes_on(tmp_path):
    crashed = toy([*PROBE, "callbacks.probe.trouble=raise"], tmp_path)
    assert crashed.code == 1 and crashed.err.count("Traceback") == 1
    log = (tmp_path / "runs/r/logs/rank0.log").read_text()
    assert " ERROR Traceback" in log and log.endswith("RuntimeError: trouble at step 3\n")
    summary = json.loads((tmp_path / "runs/r/summary.json").read_text())
    assert (summary["stopped"], summary["error"]) == ("error", "RuntimeError: trouble at step 3")

    again = toy([*PROBE, "callbacks.probe.trouble=", "trainer.resume=auto", "trainer.max_steps=6"], tmp_path)
    assert again.code == 0, again.err  # though the crash came before a checkpoint
    assert json.loads((tmp_path / "runs/r/summary.json").read_text())["stopped"] == "max_steps"
    assert [line["step"] for line in lines(tmp_path / "runs/r")][-1] == 6


@pytest.mark.slow
def test_other_threads_are_told_by_a_resume(tmp_path):
    assert toy(["trainer.run_dir=runs/r", "trainer.max_steps=2"], tmp_path).code == 0
    more = ["trainer.run_dir=runs/r", "trainer.max_steps=4", "trainer.resume=auto"]
    resumed = toy(more, tmp_path, OMP_NUM_THREADS="2")
    assert resumed.code == 0 and "resume: machine.threads was 1 and is 2\n" in resumed.out, resumed.err + resumed.out


def test_a_constructor_that_splits_at_random_cuts_alike_on_all_ranks_and_after_a_resume(tmp_path, monkeypatch):
    """As sklearn's train_test_split without a random_state: ranks trained on samples of each other's validation."""
    module = "import random, numpy, torch\nclass Split:\n    def __init__(self):\n        self.drawn = "
    (tmp_path / "split_at_random.py").write_text(
        module + "(random.random(), numpy.random.rand(), torch.rand(1).item())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = toy_config()
    config["recipe"] = {"_target_": "split_at_random.Split"}
    config["trainer"]["allow_targets"] = ["split_at_random"]
    drawn = [
        build_components(config | {"trainer": config["trainer"] | {"seed": seed}})["recipe"].drawn for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] and not set(drawn[0]) & set(drawn[2])


def test_gpus_that_srun_hides_from_each_other_are_told_of(tmp_path, monkeypatch, capsys):
    trainer = Trainer(Toy(), batch=12, place=Place())
    told = "warning: srun --gpus-per-task=1: each rank sees its own GPU alone"
    for hidden in (False, True):
        monkeypatch.setattr(Ranks, "gpus_hidden", lambda self, hidden=hidden: hidden)
        describe(trainer.loop, NCCLOptions())
        assert (told in capsys.readouterr().out) == hidden
    trainer.close()


@pytest.mark.parametrize(
    ("world", "counted"), [(1, "1 rank(s) on cpu, fp32, 756 p"), (2, "2 rank(s) on cpu, fp32, 756 p")]
)
def test_ranks_that_share_a_batch_are_told_apart_from_replicas(world, counted, tmp_path, capsys):
    """As two stages of a pipeline do."""
    trainer = Trainer(Toy(), batch=12, place=Place())
    trainer.world = world
    describe(trainer.loop, NCCLOptions())
    trainer.close()
    line = next(line for line in capsys.readouterr().out.splitlines() if "batch 12" in line)
    assert line.startswith(counted) and f"batch 12 = 1 {'rank(s)' if world == 1 else 'replica(s)'} x" in line


def test_a_value_with_a_dollar_and_a_brace_is_no_interpolation(tmp_path):
    save_config({"run_dir": "runs/x${y 1", "lr": 1e-5}, tmp_path)
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml"), resolve=True) == {
        "run_dir": "runs/x${y 1",
        "lr": 1e-5,
    }


def test_a_recipes_own_optimizer_and_schedule():
    class Own(Toy):
        schedule = "own"

    optimizer, schedule = ({"_target_": target} for target in OF_RECIPE)
    assert build_or_own("schedule", schedule, (), Own()) == "own"
    with pytest.raises(
        ConfigError, match="optimizer=recipe: Own has no optimizer of its own; choose another optimizer"
    ):
        build_or_own("optimizer", optimizer, (), Own())


def test_variables_that_change_bits_are_settings(monkeypatch):
    """MKL_CBWR chooses the kernels of sums. Numbers of threads have a setting of their own."""
    known = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "NVIDIA_TF32_OVERRIDE": "0"}
    for name, value in {**known, "MKL_NUM_THREADS": "3", "MKLX": "1"}.items():
        monkeypatch.setenv(name, value)
    found = arithmetic()
    assert {f"machine.{name}": value for name, value in known.items()}.items() <= found.items()
    assert not {"machine.MKL_NUM_THREADS", "machine.MKLX"} & found.keys()
    was = {"settings": found, "versions": {}}
    monkeypatch.delenv("MKL_CBWR")
    own = {"settings": arithmetic(), "versions": {}, "ddp": {}}
    assert differences(was, own) == ["machine.MKL_CBWR was COMPATIBLE and is null"]
