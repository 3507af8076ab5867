"""The form of groups of parameters: each fault in one line, with the key."""

from typing import Any

import pytest
from support.messages import refuses

from trainer.config.check import check_node
from trainer.config.parameter_groups import check_groups
from trainer.errors import ConfigError

FAULTS: list[tuple[Any, str]] = [
    ("encoder.*", r"optimizer\.groups=encoder\.\*: must be a list of groups"),
    ({"match": "a"}, r"must be a list of groups"),
    (["encoder.*"], r"optimizer\.groups\.0=encoder\.\*: must be a mapping with the key match"),
    ([{"lr_scale": 0.1}], r"optimizer\.groups\.0=.*: must be a mapping with the key match"),
    ([{"match": ""}], r"optimizer\.groups\.0\.match=: must be a pattern of names, or a list of patterns"),
    ([{"match": 3}], r"match=3: must be a pattern"),
    ([{"match": []}], r"match=\[\]: must be a pattern"),
    ([{"match": "a"}, {"match": "b", "lr_scal": 1}], r"groups\.1\.lr_scal=1: no such .*; did you mean lr_scale"),
    ([{"match": "a", "momentum": 0.9}], r"groups\.0\.momentum=0\.9: no such setting of a group"),
    ([{"match": "a", "lr_scale": -0.1}], r"groups\.0\.lr_scale=-0\.1: must be at least 0"),
    ([{"match": "a", "lr_scale": float("nan")}], r"groups\.0\.lr_scale=nan: must be at least 0"),
    ([{"match": "a", "lr_scale": "0.1x"}], r"groups\.0\.lr_scale=0\.1x: must be float, not str"),
    ([{"match": "a", "freeze": 1}], r"groups\.0\.freeze=1: must be bool, not int"),
    ([{"match": "a", "freeze": True, "lr_scale": 0.1}], r"groups\.0\.lr_scale: has no effect on frozen parameters"),
    ([{"match": "a", "lr": 0.1, "lr_scale": 0.1}], r"groups\.0\.lr_scale: .*the group has its own lr; leave one out"),
    ([{"match": "a", "weight_decay": "no"}], r"groups\.0\.weight_decay=no: must be float, not str"),
]


@pytest.mark.parametrize(("groups", "told"), FAULTS, ids=str)
def test_a_fault_is_one_line(groups, told):
    with pytest.raises(ConfigError, match=told):
        check_groups("optimizer.groups", groups, known={"lr": float, "weight_decay": float})


def test_what_is_right_passes():
    known = {"lr": float, "weight_decay": float}
    check_groups("optimizer.groups", [{"match": ["a", "b*"], "lr_scale": 0, "weight_decay": 1}], known=known)
    check_groups("optimizer.groups", [{"match": "a", "freeze": False, "lr": 0.1}, {"match": "b"}], known=known)
    check_groups("recipe.parameter_groups()", [{"params": [], "anything": 1}], "params")


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ([{"match": "a", "momentum": 0.9}], r"optimizer\.groups\.0\.momentum=0\.9: no such setting of a group"),
        ([{"match": "a", "weight_decay": "no"}], r"optimizer\.groups\.0\.weight_decay=no: must be float"),
        ([{"match": "a", "lr": {"_target_": "os.system"}}], "a _target_ inside arguments is not built"),
        ("all", r"optimizer\.groups=all: must be a list"),
    ],
)
def test_the_check_of_a_config_knows_the_optimizers_settings(groups, told):
    node = {"_target_": "trainer.optim.factories.adamw", "_partial_": True, "lr": 1e-3, "groups": groups}
    with pytest.raises(ConfigError, match=told):
        check_node("optimizer", node, ("trainer.optim",))
    check_node("optimizer", {**node, "groups": None}, ("trainer.optim",))
    check_node("optimizer", {**node, "groups": [{"match": "a", "betas": [0.9, 0.95]}]}, ("trainer.optim",))


def test_only_an_optimizer_has_groups():
    with refuses("schedule.groups=null", "such"):
        node = {"_target_": "trainer.optim.schedule.Constant", "groups": None}
        check_node("schedule", node, ("trainer.optim",))
