"""Which parameters decay, which do not, and which are in no group; settings for some of the parameters."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import refuses
from support.ranks import run_ranks
from torch import nn
from toy_recipe import Toy

from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError
from trainer.optim.factories import adafactor, adamw, adamw8bit
from trainer.optim.groups import ParameterRules, WithGroups, make_optimizer, parameter_groups
from trainer.optim.muon import Muon
from trainer.process.environment import Place
from trainer.trainer import Trainer


def test_no_decay_on_norms_and_biases():
    """A transformer layer: in and out projections and two linear layers decay; their biases and two norms do not."""
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    decay, rest = parameter_groups(layer)
    names = {p: name for name, p in layer.named_parameters()}
    assert {names[p] for p in decay["params"]} == {
        "self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight",
    }  # fmt: skip
    assert len(rest["params"]) == 8
    assert {names[p].rpartition(".")[2] for p in rest["params"]} == {"bias", "in_proj_bias", "weight"}
    assert len(decay["params"]) + len(rest["params"]) == len(names)


def test_frozen_parameters_are_in_no_group_and_no_group_is_empty():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    layer.linear1.requires_grad_(False)
    assert sum(len(group["params"]) for group in parameter_groups(layer)) == 10
    assert len(parameter_groups(nn.LayerNorm(4))) == 1
    assert len(parameter_groups(nn.Linear(4, 4, bias=False))) == 1


def net() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Module()
    module.encoder = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    module.head = nn.Linear(4, 4, bias=False)
    return module


class Recipe:
    def __init__(self, groups: Callable[[nn.Module], Any]) -> None:
        self.parameter_groups = groups


def made(groups: Any = (), recipe: Any = None, optimizer: Any = adamw, module: nn.Module | None = None) -> Any:
    """name -> its group in the optimizer, or None if the parameter is frozen."""
    module = module or net()
    optimizer = WithGroups(optimizer, groups)
    rules = ParameterRules(optimizer, recipe, module)
    groups = {p: group for group in make_optimizer(optimizer, module, rules).param_groups for p in group["params"]}
    assert set(groups) == {p for p in module.parameters() if p.requires_grad}
    return {name: groups.get(p) for name, p in module.named_parameters()}


def column(groups: dict[str, Any], key: str) -> list[Any]:
    return [group and group[key] for group in groups.values()]


NAMES = [
    "encoder.0.weight", "encoder.0.bias", "encoder.1.weight", "encoder.1.bias", "encoder.2.weight", "encoder.2.bias",
    "head.weight",
]  # fmt: skip


def test_a_rate_and_a_decay_of_a_group():
    found = made([{"match": "encoder.*", "lr_scale": 0.1}, {"match": "head.*", "weight_decay": 0.5}], optimizer=adamw)
    assert list(found) == NAMES
    assert column(found, "lr") == pytest.approx([1e-4] * 6 + [1e-3])
    assert column(found, "weight_decay") == [0.01, 0.0, 0.0, 0.0, 0.01, 0.0, 0.5]
    assert "lr_scale" not in found["head.weight"]


def test_a_decay_that_a_group_gives_is_for_its_vectors_too():
    found = made([{"match": "encoder.*", "weight_decay": 0.5}])
    assert column(found, "weight_decay") == [0.5] * 6 + [0.01]


def test_the_first_group_that_matches_has_the_parameter():
    """So an exception comes before its rule; several patterns are one group."""
    rules = [{"match": "*.bias"}, {"match": ["encoder.0.*", "encoder.2.*"], "freeze": True}, {"match": "*", "lr": 0.5}]
    found = made(rules)
    assert column(found, "lr") == [None, 1e-3, 0.5, 1e-3, None, 1e-3, 0.5]


def test_a_group_of_the_recipe_comes_after_those_of_the_config():
    recipe = Recipe(
        lambda model: [
            {"params": [*model.head.parameters(), *model.encoder[0].parameters()], "lr_scale": 0.5},
            {"params": model.encoder[2].parameters(), "freeze": True},
        ]
    )
    found = made([{"match": "head.*", "lr_scale": 0.1}], recipe)
    assert column(found, "lr") == pytest.approx([5e-4, 5e-4, 1e-3, 1e-3, None, None, 1e-4])


def test_layer_wise_decay_of_the_rate():
    """From the config, and from a recipe in a loop (Howard and Ruder 2018, arXiv:1801.06146)."""
    expected = pytest.approx([1e-3 * 0.8**2] * 2 + [1e-3 * 0.8] * 2 + [1e-3] * 3)
    rules = [{"match": "encoder.0.*", "lr_scale": 0.8**2}, {"match": "encoder.1.*", "lr_scale": 0.8}]
    assert column(made(rules), "lr") == expected

    def groups(model: Any) -> list[dict[str, Any]]:
        depth = len(model.encoder)
        return [{"params": layer.parameters(), "lr_scale": 0.8 ** (depth - 1 - i)}
                for i, layer in enumerate(model.encoder)]  # fmt: skip

    assert column(made(recipe=Recipe(groups)), "lr") == expected


def test_a_tied_parameter_is_found_by_any_of_its_names():
    module = net()
    module.tied = nn.Linear(4, 4, bias=False)
    module.tied.weight = module.head.weight
    found = made([{"match": "tied.*", "lr": 0.5}], module=module)
    assert found["head.weight"]["lr"] == 0.5 and "tied.weight" not in found


def test_groups_without_rules_come_first():
    """Their rate is the one that is logged."""
    module = net()
    optimizer = WithGroups(adamw, [{"match": "encoder.0.weight", "lr_scale": 0.1}])
    made = make_optimizer(optimizer, module, ParameterRules(optimizer, None, module))
    assert [group["lr"] for group in made.param_groups] == [1e-3, 1e-3, 1e-4]


def test_hidden_by_a_group():
    found = made([{"match": "head.*", "hidden": False}], optimizer=partial(Muon, lr=0.5, adamw_lr=0.1))
    assert column(found, "hidden") == [True, False, False, False, True, False, False]
    assert column(found, "lr") == [0.5, 0.1, 0.1, 0.1, 0.5, 0.1, 0.1]


REFUSED: list[tuple[Any, Any, str]] = [
    ([{"match": "encodr.*"}], adamw, r"^optimizer\.groups\.0\.match=encodr\.\*: no parameter .*; did you mean encoder"),
    ([{"match": "xyzzy"}], adamw, r"no parameter has such a name; the names begin with encoder\.0\.weight, encoder\.0"),
    ([{"match": ["head.*", "hed.weight"]}], adamw, r"match=hed\.weight: no parameter .*; did you mean head\.weight"),
    ([{"match": "*"}, {"match": "head.*", "lr": 1.0}], adamw, r"groups\.1: all its parameters are in groups before it"),
    ([{"match": "head.*", "momentum": 0.5}], adamw, r"groups\.0\.momentum=0\.5: AdamW has no such setting"),
    ([{"match": "head.*", "hidden": False}], adamw, r"groups\.0\.hidden=False: AdamW has no such setting"),
    ([{"match": "head.*", "weight_decay": -1.0}], adamw, r"groups\.0: optimizer\.weight_decay=-1\.0: must be at least"),
    ([{"match": "head.*", "betas": [0.9, 2.0]}], adamw, r"groups\.0: optimizer\.betas\.1=2\.0: must be less than 1"),
    ([{"match": "head.*", "momentum": -1.0}], torch.optim.SGD, r"groups\.0: Invalid momentum value: -1\.0"),
    ([{"match": "head.*", "min_8bit_size": 9}], adamw8bit, r"min_8bit_size=9: AdamW8bit has no such setting"),
    ([{"match": "*", "hidden": True}], Muon, r"hidden=true matches a parameter of shape \(4,\)"),
]


@pytest.mark.parametrize(("groups", "optimizer", "told"), REFUSED)
def test_refusals(groups, optimizer, told):
    with pytest.raises(ConfigError, match=told):
        made(groups, optimizer=optimizer)


def test_what_a_recipe_gives_is_checked():
    with refuses("recipe.parameter_groups()=None", "a list"):
        made(recipe=Recipe(lambda model: None))
    with refuses("recipe.parameter_groups().0={'match'", "params"):
        made(recipe=Recipe(lambda model: [{"match": "head.*"}]))
    with refuses("recipe.parameter_groups().0.params", "3", "model.parameters()"):
        made(recipe=Recipe(lambda model: [{"params": [torch.ones(3)]}]))
    with refuses("recipe.parameter_groups().0.params", "'head.weight'", "model.parameters()"):
        made(recipe=Recipe(lambda model: [{"params": ["head.weight"]}]))


def test_a_group_of_parameters_that_the_recipe_has_frozen_is_refused():
    module = net()
    module.head.requires_grad_(False)
    with refuses("optimizer.groups.0", "parameters", "already"):
        made([{"match": "head.*", "lr_scale": 0.5}], module=module)


MALFORMED: list[tuple[Any, dict[str, Any], str]] = [
    (adamw, {"betas": [0.9]}, r"betas=\[0\.9\]: must be 2 numbers, as \(0\.9, 0\.98\)$"),
    (adamw, {"betas": 0.9}, r"betas=0\.9: must be 2 numbers"),
    (adamw, {"betas": ["a", 0.9]}, r"betas=\['a', 0\.9\]: must be 2 numbers"),
    (adamw, {"lr": "1e-3"}, r"lr='1e-3': must be a number$"),
    (adamw, {"lr": None}, r"lr=None: must be a number"),
    (adamw, {"lr": True}, r"lr=True: must be a number"),
    (lambda groups: adamw(groups, lr=0.5), {"lr": "1e-3"}, r"lr='1e-3': must be a number"),
    (torch.optim.SGD, {"weight_decay": "x"}, r"weight_decay='x': must be a number"),
    (torch.optim.SGD, {"nesterov": "yes"}, r"nesterov='yes': must be true or false"),
]


@pytest.mark.parametrize(("optimizer", "setting", "told"), MALFORMED)
def test_a_malformed_value_is_one_line_with_its_key(optimizer, setting, told):
    with pytest.raises(ConfigError, match=r"^optimizer\.groups\.0\." + told):
        made([{"match": "head.*", **setting}], optimizer=optimizer)
    with pytest.raises(ConfigError, match=r"^recipe\.parameter_groups\(\)\.0\." + told):
        made(recipe=Recipe(lambda model: [{"params": model.head.parameters(), **setting}]), optimizer=optimizer)


def test_values_that_an_optimizer_takes_are_not_refused():
    assert made([{"match": "head.*", "lr": torch.tensor(0.5)}])["head.weight"]["lr"] == 0.5
    assert made([{"match": "head.*", "eps": (1e-30, 0.1)}], optimizer=adafactor)["head.weight"]["eps"] == (1e-30, 0.1)
    assert made([{"match": "head.*", "eps": [None, 1]}], optimizer=adafactor)["head.weight"]["eps"] == [None, 1]


class Tuned(Toy):
    """The first layer is frozen, as for a head on a trained encoder."""

    def parameter_groups(self, model: Any) -> list[dict[str, Any]]:
        return [{"params": model.first.parameters(), "freeze": True}]


def tune(place: Place, groups: Any, steps: int, resume: str | None = None) -> tuple[dict[str, Any], list[list[int]]]:
    options = Options(
        max_steps=steps, run_dir=f"runs/{steps}", resume=resume, checkpoint=CheckpointOptions(every_steps=2)
    )
    trainer = Trainer(
        Tuned(), {}, WithGroups(partial(adamw, lr=0.05), groups), batch=12, place=place, options=options,
        data=DataOptions(workers=0),
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in trainer.module.named_parameters()}
    trainer.fit()
    moved = {name: (p.detach() - before[name]).abs().max().item() for name, p in trainer.module.named_parameters()}
    return moved, trainer.buckets


def test_a_frozen_parameter_stays_and_is_not_reduced(tmp_path):
    for moved, buckets in run_ranks(3, tune, [{"match": "blocks.0.*", "freeze": True}], 2):
        still = {name for name, most in moved.items() if most == 0.0}
        assert still == {"first.weight", "first.bias", "blocks.0.0.weight", "blocks.0.0.bias"}
        assert sorted(i for bucket in buckets for i in bucket) == [0, 1, 2, 3]  # of the four that are trained


def test_a_resume_compares_groups(tmp_path):
    rule = {"match": "last.*", "lr_scale": 0.5}
    tune(Place(), [rule], 2)
    tune(Place(), [rule], 4, "ckpt/2")
    assert "optimizer.groups" not in Path("runs/4/logs/rank0.log").read_text()
    tune(Place(), [{**rule, "lr_scale": 0.25}], 6, "ckpt/2")
    assert "resume: optimizer.groups was [{" in Path("runs/6/logs/rank0.log").read_text()
    with refuses("trainer.resume", "last.bias", "trainer.init_from"):
        tune(Place(), [{"match": "last.*", "freeze": True}], 8, "ckpt/2")
