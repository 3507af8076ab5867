"""The definitions of nccl-tests, by the numbers of its own page (doc/PERFORMANCE.md)."""

import pytest

from trainer.comm.bandwidth import BUS_FACTORS, bandwidths, level_of


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 8, 0.875),
        ("all_to_all", 2, 0.5),
        ("broadcast", 8, 1.0),
        ("send", 2, 1.0),
    ],
)
def test_bus_bandwidth_is_algorithm_bandwidth_times_the_factor(collective: str, ranks: int, factor: float) -> None:
    algbw, busbw = bandwidths(collective, 1e6, 0.002, ranks)
    assert algbw == pytest.approx(5e8)
    assert busbw == pytest.approx(5e8 * factor)


def test_one_rank_sends_nothing() -> None:
    alone = {name: factor(1) for name, factor in BUS_FACTORS.items()}
    assert all(alone[name] == 0 for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"))


def test_levels_of_two_nodes_with_two_ranks() -> None:
    assert [level_of(ranks, 2) for ranks in ([0, 1], [2, 3], [1, 3], [0, 1, 2, 3])] == [
        "inside", "inside", "across", "all",
    ]  # fmt: skip
    assert level_of([0, 1, 2], 3) == "inside"
    assert level_of([0, 1, 2], 1) == "across"
