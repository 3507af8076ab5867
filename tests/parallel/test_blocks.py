"""The blocks of a model: from the recipe, by class, or the longest list."""

from types import SimpleNamespace

import pytest
from torch import nn

from trainer.errors import ConfigError
from trainer.parallel.blocks import find_blocks


def net() -> nn.Sequential:
    short, long = nn.ModuleList([nn.Linear(1, 1)]), nn.ModuleList([nn.Linear(1, 1), nn.Tanh()])
    return nn.Sequential(short, long, nn.Tanh())


def test_the_longest_list_unless_the_recipe_or_the_config_says_otherwise():
    model = net()
    assert find_blocks(object(), model, None, "k") == list(model[1])  # pyright: ignore[reportArgumentType]
    recipe = SimpleNamespace(blocks=lambda model: [model[2]])
    assert find_blocks(recipe, model, None, "k") == [model[2]]
    assert find_blocks(recipe, model, ["Tanh"], "k") == [model[1][1], model[2]]  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize(
    ("blocks", "said"), [([], "returned nothing"), ([nn.ReLU()], "returned ReLU"), (["0"], "returned str")]
)
def test_blocks_that_are_not_the_models_are_refused(blocks, said):
    with pytest.raises(ConfigError, match=rf"recipe.blocks\(\): {said}"):
        find_blocks(SimpleNamespace(blocks=lambda model: blocks), net(), None, "k")


@pytest.mark.parametrize(
    ("classes", "said"), [(None, "k=null: no nn.ModuleList"), (["Nope"], r"k=\[Nope\]: no Nope in this model")]
)
def test_a_model_without_such_blocks_is_refused(classes, said):
    with pytest.raises(ConfigError, match=said):
        find_blocks(object(), nn.Sequential(nn.Linear(1, 1)), classes, "k")
