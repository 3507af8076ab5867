"""What ranks ask a step to end with, over real process groups, without a trainer."""

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.ranks import run_ranks

from trainer.agreement import StepAgreement
from trainer.comm.ranks import Ranks
from trainer.process.environment import Place
from trainer.state import TrainingState


def agreement(
    ranks: Any, data_world: int, signal: str = "", save_s: float = math.inf, validate_s: float = math.inf
) -> StepAgreement:
    plan: Any = SimpleNamespace(save_s=save_s, validate_s=validate_s)
    agreed = StepAgreement(ranks, TrainingState(), plan, data_world)
    agreed.signals = SimpleNamespace(name=signal)  # pyright: ignore[reportAttributeAccessIssue]
    return agreed


def step(bad: int, *weights: int) -> Any:
    return SimpleNamespace(bad=[None] * bad, weights=weights)


def sums(place: Place) -> tuple[Any, ...]:
    """Ranks 1 and 2 have bad samples, rank 2 a signal; the clock of rank 1 alone is ahead."""
    ranks = Ranks(place, "cpu", None, 60)
    agreed = agreement(ranks, 1, "SIGTERM" if place.rank == 2 else "", validate_s=100)
    agreed.state.validated_at -= 1000 * (place.rank == 1)
    wait = agreed.begin(step(place.rank, 4, 6))
    pending = agreed.sums is not None
    found = (pending, wait(), wait(), agreed.bad, agreed.requests, agreed.sums)
    agreed.state.validated_at -= 1000 * (place.rank == 0)
    agreed.signals.name = ""
    agreed.begin(step(0, 7))
    agreed.wait()
    ranks.leave()
    return *found, agreed.requests, agreed.weight


@pytest.mark.usefixtures("tmp_path")
def test_three_ranks_sum_what_they_ask_for_and_follow_the_first_one_s_clock():
    """They read the same samples, so their items count once."""
    assert run_ranks(3, sums) == [(True, 10, 10, 3, [1, 0, 0], None, [0, 0, 1], 7)] * 3


def test_one_rank_needs_no_sums():
    agreed = agreement(SimpleNamespace(world=1, rank=0), 1, "SIGTERM", save_s=50)
    agreed.state.saved_at = time.monotonic() - 60
    assert agreed.begin(step(2, 12))() == agreed.weight == 12
    assert (agreed.bad, agreed.requests, agreed.sums) == (2, [True, True, False], None)
