"""Configs of trials: they write nowhere else, and begin where the run would begin."""

from pathlib import Path

import pytest
from support.configs import toy_config
from support.runs import make

from trainer.config.check import check
from trainer.cost.workload import Choice
from trainer.tools.cost_model.read import defaults
from trainer.tools.tune.configs import alone, begun, find_start, merge, of_trial, ranks_with_data, whole


@pytest.fixture
def config(tmp_path: Path) -> dict:
    return toy_config()


def test_a_choice_changes_a_copy(config: dict) -> None:
    before = repr(config)
    made = merge(config, Choice({"overlap": {}, "memory": {"snapshot": True}}, {"trainer.ddp.bucket_mib": 5.0}))
    check(made)
    assert repr(config) == before and made["trainer"]["ddp"]["bucket_mib"] == 5.0
    assert made["callbacks"]["overlap"] == defaults("overlap") and made["callbacks"]["memory"]["snapshot"] is True


def test_the_model_reads_callbacks_that_compute_and_what_differs(config: dict) -> None:
    made = merge(config, Choice({"shard": {"stage": 2}, "overlap": {}}, {"micro_batch": 3, "accumulate": None}))
    found = whole(made, 2, cuda=False)
    assert found.callbacks == {"shard": {"stage": 2}, "overlap": {}}
    view = "trainer.ddp.gradient_as_bucket_view"
    assert found.settings == {"micro_batch": 3, "data.workers": 0, view: False}
    assert whole(made, 2, cuda=True).settings[view] is True  # as DDP has it there


def test_a_trial_writes_into_its_folder_alone(config: dict, tmp_path: Path) -> None:
    config["trainer"]["log_every_steps"] = 50
    config["trainer"]["checkpoint"]["every"] = "auto"
    made = of_trial(config, tmp_path / "own", 7, 30, 23)
    check(made)
    options = made["trainer"]
    assert options["run_dir"] == str(tmp_path / "own" / "run-7") and options["timeout_s"] == 30
    assert options["log_every_steps"] == 4  # so that advice and step_timer say something in 23 steps
    assert options["checkpoint"]["dir"] == str(tmp_path / "own" / "ckpt")
    assert not any(options["checkpoint"][name] for name in ("every", "every_steps", "every_minutes"))
    assert options["validate_every"] is None and options["resume"] is None
    assert set(made["callbacks"]) == {"advice", "memory", "step_timer", "throughput"}  # the others would show or write


def test_a_trial_begins_at_the_checkpoint_that_the_run_would_take(config: dict, tmp_path: Path) -> None:
    trainer = make(max_steps=4)
    trainer.fit()
    config["trainer"] |= {"resume": "auto", "run_dir": "runs/r"}
    damaged = tmp_path / "ckpt" / "r" / "step-00000005"  # a running job may be at work on it
    damaged.mkdir()
    pinned = begun(config, find_start(config))
    assert damaged.exists()
    (tmp_path / "ckpt" / "r" / "step-00000004").rename(tmp_path / "ckpt" / "r" / "step-00000008")  # the job goes on
    made = of_trial(pinned, tmp_path / "own", 1, 30, 23)
    assert made["trainer"]["resume"] == str((tmp_path / "ckpt" / "r" / "step-00000004").resolve())
    assert made["trainer"]["run_dir"] == str(tmp_path / "own" / "run-1")
    assert made["trainer"]["accept"] == ["callbacks"]  # a trial has others than the run


def test_a_rank_alone_has_its_part_of_the_batch(config: dict) -> None:
    config["micro_batch"] = 2
    made = alone(merge(config, Choice({"shard": {}, "hierarchical": {}}, {})), 3)
    check(made)
    assert (made["batch"], made["micro_batch"], made["accumulate"]) == (4, 2, 2)
    assert not {"shard", "hierarchical"} & made["callbacks"].keys()
    assert ranks_with_data(merge(config, Choice({"pipeline": {"stages": 2}}, {})), 4) == 2
