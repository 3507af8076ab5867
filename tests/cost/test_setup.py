"""Choices are checked against the YAMLs; what is not modelled is said."""

from typing import Any

import pytest
from support.costs import WORKLOAD, choose, machine, setup

from trainer.config.compose import CONF
from trainer.errors import ConfigError
from trainer.cost.collectives import Group
from trainer.cost.setup import FREE, MODELLED, MONITORS, WHY, defaults
from trainer.cost.workload import Choice

CALLBACKS = sorted(path.stem for path in (CONF / "callbacks").glob("*.yaml"))


@pytest.mark.parametrize("name", CALLBACKS)
def test_no_callback_is_ignored_silently(name: str) -> None:
    said = any(name in line for line in setup(machine(4), choose({name: {}})).unknown)
    yaml = (CONF / "callbacks" / f"{name}.yaml").read_text()
    monitor = any(package in yaml for package in MONITORS)
    assert said == (name not in MODELLED | FREE and not monitor) or name == "pipeline"


def test_the_lists_name_callbacks_that_exist() -> None:
    assert MODELLED | FREE | WHY.keys() <= set(CALLBACKS)


def test_a_callback_of_the_user_s_is_named() -> None:
    assert "callbacks.mine" in setup(machine(), choose({"mine": {"knob": 1}})).unknown[0]


def test_defaults_are_the_yaml_s() -> None:
    known = defaults("local_sgd")
    assert known is not None and known["every"] == 8
    assert setup(machine(), choose({"local_sgd": {"every": 3}})).callbacks["local_sgd"]["fragments"] == 1


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (choose({"local_sgd": {"evry": 3}}), "callbacks.local_sgd.evry=3: no such knob; did you mean every"),
        (choose(trainer__ddp__bucket_mb=3), "trainer.ddp.bucket_mb=3: no such setting; did you mean"),
        (choose({"pipeline": {"stages": 3}}), "callbacks.pipeline.stages=3: does not divide 4"),
    ],
)
def test_what_does_not_exist_is_refused(choice: Choice, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        setup(machine(4), choice)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data__workers": 3, "micro_batch": 1, "nccl__algo": "Tree"}, 0),
        ({"nccl__algo": "PAT"}, 1),
        ({"nccl__buffer_mib": 8}, 1),
        ({"trainer__clip_norm": 1.0}, 1),
        ({"trainer__precision": "bf16"}, 1),
    ],
)
def test_settings_without_a_model_are_said(settings: dict[str, Any], said: int) -> None:
    assert len(setup(machine(), choose(**settings)).unknown) == said


def test_a_codec_without_a_measured_cost_is_said() -> None:
    assert "codec int8" in setup(machine(codecs={}), choose({"grad_compress": {"codec": "int8"}})).unknown[0]


@pytest.mark.parametrize(
    ("settings", "micro", "passes"),
    [({}, 8, 1), ({"micro_batch": 2}, 2, 4), ({"accumulate": 3}, 3, 3), ({"micro_batch": 100}, 8, 1)],
)
def test_micro_batches(settings: dict[str, Any], micro: int, passes: int) -> None:
    found = setup(machine(2), choose(**settings), batch=15)  # 8 samples on the fuller rank
    assert (found.samples, found.micro, found.passes) == (8, micro, passes)


def test_the_replicas_of_a_stage_are_neighbours() -> None:
    found = setup(machine(16, 4), choose({"pipeline": {"stages": 2}}))
    assert found.group == Group(2, 4) and found.own in ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))
    assert found.gradient_bytes == 2 * sum(WORKLOAD.parameters)
    assert found.optimizer_bytes == 4 * sum(WORKLOAD.parameters)
