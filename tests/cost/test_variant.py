"""Where two levels of a network are."""

import pytest

from trainer.cost.variant import Situation


@pytest.mark.parametrize(("ranks", "nodes", "two"), [(4, 2, True), (4, 1, False), (4, 4, False), (1, 1, False)])
def test_several_nodes_with_several_ranks_each(ranks: int, nodes: int, two: bool) -> None:
    assert Situation(ranks, nodes, 0, 0).two_levels == two
