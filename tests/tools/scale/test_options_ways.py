"""The ways of the YAML name callbacks and knobs that there are."""

import pytest

from trainer.tools.cost_model.read import costs_of
from trainer.tools.scale.options import VIEW, WAYS


@pytest.mark.parametrize("name", WAYS)
def test_each_way_has_a_cost(name: str) -> None:
    way = WAYS[name]
    assert all(costs_of(way.callbacks, ()).values()) and way.settings.items() >= VIEW.items()
