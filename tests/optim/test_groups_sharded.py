"""Groups of parameters in every layout: a frozen one, another rate and another decay give plain training's weights."""

from typing import Any

import numpy as np
import pytest
from support.ranks import run_ranks
from support.sharded import Case, fit
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.optimizer_in_backward import OptimizerInBackward
from trainer.callbacks.pipeline.callback import PipelineParallel
from trainer.callbacks.shard.callback import Shard
from trainer.optim.factories import sgd
from trainer.optim.groups import WithGroups
from trainer.process.environment import Place

WORLD = 3
GROUPS: list[dict[str, Any]] = [
    {"match": "blocks.0.*", "freeze": True},
    {"match": "blocks.1.*", "lr_scale": 0.1, "weight_decay": 0.2},
    {"match": "*.bias", "lr": 0.3},
]
LAYOUTS: dict[str, dict[str, Callback]] = {
    "plain": {},
    "stage 1": {"shard": Shard(1)},
    "stage 2": {"shard": Shard(2)},
    "stage 3": {"shard": Shard(3)},
    "in backward": {"optimizer_in_backward": OptimizerInBackward()},
    "pipeline": {"pipeline": PipelineParallel(stages=3, schedule="gpipe")},
}
BOUNDS = {"stage 3": 1e-6, "pipeline": 1e-6}


def train_all(place: Place) -> dict[str, dict[str, Any]]:
    cases = {"no groups": Case(optimizer=sgd)} | {
        name: Case(callbacks, optimizer=WithGroups(sgd, GROUPS)) for name, callbacks in LAYOUTS.items()
    }
    for name, case in cases.items():
        case.recipe, case.run, case.options = Toy(width=17, depth=3), name.replace(" ", "-"), {"clip_norm": None}
    return dict(zip(cases, fit(place, list(cases.values())), strict=True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[dict[str, dict[str, Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("groups"))
        return run_ranks(WORLD, train_all, timeout_s=200)


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_groups_are_those_of_plain_training(runs, layout):
    known = np.zeros(len(runs[0]["plain"]["weights"]), bool)
    for rank in runs:
        plain, ours = rank["plain"], rank[layout]
        assert "refused" not in ours, ours
        own = ~np.isnan(ours["weights"])  # a stage of a pipeline has no others
        known |= own
        assert np.abs(ours["weights"] - plain["weights"])[own].max() <= BOUNDS.get(layout, 0.0)
        assert np.abs(np.subtract(ours["losses"], plain["losses"])).max() <= BOUNDS.get(layout, 0.0)
    assert known.all()


def test_each_group_has_its_own_settings(runs):
    """Else plain training would prove nothing."""
    one, other = (runs[0][name]["weights"] for name in ("no groups", "plain"))
    assert np.abs(one - other).max() > 1e-2
