"""What follows from a machine, a workload and a choice: micro-batches, groups of ranks, and the bytes of a rank."""

from typing import Any

import pytest
from support.costs import WORKLOAD, choose, machine, setup

from trainer.cost.collectives import Group


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
