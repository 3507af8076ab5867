"""Which stage has which blocks and parameters."""

import pytest
from torch import nn

from trainer.parallel.layout import Layout, holders, part_sums

WIDTH = 6


class Tower(nn.Module):
    """A head, four blocks and a tail."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, 1)


def test_a_tied_parameter_belongs_to_both_ends() -> None:
    net = Tower()
    net.last.weight = net.embed.weight
    block = WIDTH * WIDTH + WIDTH
    assert part_sums(net, list(net.layers), nn.Parameter.numel) == [5 * WIDTH, *[block] * 4, 4 * WIDTH + 1]
    uses = holders(net, list(net.layers), Layout((0, 2), 4, 2))
    assert uses["embed.weight"] == [0, 1] and uses["embed.bias"] == [0] and uses["last.bias"] == [1]
    assert uses["layers.1.weight"] == [0] and uses["layers.2.weight"] == [1]


@pytest.mark.parametrize(("v", "ranks", "of"), [(False, 3, [0, 1, 2, 0, 1, 2]), (True, 3, [0, 1, 2, 2, 1, 0])])
def test_places_of_two_stages_on_a_rank(v: bool, ranks: int, of: list[int]) -> None:
    layout = Layout((0, 1, 2, 3, 4, 5), 7, ranks, v)
    assert [layout.rank(stage) for stage in range(6)] == of
    assert [layout.of(rank) for rank in range(ranks)] == [[i for i in range(6) if of[i] == r] for r in range(ranks)]
    assert layout.range(5) == (5, 7) and [layout.stage(block) for block in (0, 4, 6)] == [0, 4, 5]
