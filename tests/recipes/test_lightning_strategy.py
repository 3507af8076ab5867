"""The collectives of self.trainer.strategy, on three ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

from recipes.lightning.strategy import AttachedStrategy
from trainer.comm.ranks import Ranks
from trainer.errors import ConfigError
from trainer.process.environment import Place


def strategy_of(place: Place) -> AttachedStrategy:
    ranks = Ranks(place, "cpu", "auto", 60)
    run = SimpleNamespace(ranks=ranks, device=ranks.device)
    view = SimpleNamespace(run=run, world_size=place.world, global_rank=place.rank, local_rank=place.local_rank)
    return AttachedStrategy(view)


def collectives(place: Place) -> dict[str, Any]:
    strategy = strategy_of(place)
    own = torch.full((2, 3), float(place.rank), dtype=torch.bfloat16)
    sent = strategy.broadcast(own if place.rank == 1 else None, src=1)
    found = {
        "value": strategy.broadcast({"path": "a", "steps": [place.rank, None]}, src=2),
        "tensor": (str(sent.dtype), sent.tolist()),
        "gathered": strategy.all_gather(own.float()).tolist(),
        "mean": strategy.reduce(own.float()).tolist(),
        "sum": strategy.reduce(own.float(), reduce_op="sum").tolist(),
    }
    strategy.barrier()
    strategy.view.run.ranks.leave()
    return found


def test_ranks_exchange_values_and_tensors():
    for found in run_ranks(3, collectives):
        assert found == {
            "value": {"path": "a", "steps": [2, None]},
            "tensor": ("torch.bfloat16", [[1.0] * 3] * 2),
            "gathered": [[[float(rank)] * 3] * 2 for rank in range(3)],
            "mean": [[1.0] * 3] * 2,
            "sum": [[3.0] * 3] * 2,
        }


@pytest.mark.parametrize("value", [object(), (1, 2), {1: "a"}, {"a": {1}}])
def test_what_other_ranks_would_unpickle_is_refused(value):
    view: Any = SimpleNamespace(world_size=3, global_rank=0)
    with pytest.raises(ConfigError, match=rf"broadcast\({type(value).__name__}\): must be a tensor or made of numbers"):
        AttachedStrategy(view).broadcast(value)
