"""Rows have the bytes and bandwidths of nccl-tests; levels are those of two nodes with two ranks, run for real."""

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from support.ranks import run_ranks

from trainer.comm.ranks import Ranks
from trainer.cost.machine import Link
from trainer.process.environment import Place
from trainer.tools.measure import collectives

NAMES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


def measured(place: Place, per_node: int) -> tuple[list[dict[str, Any]], int, list[str], list[Any]]:
    local_rank = place.rank % per_node
    ranks = Ranks(replace(place, local_rank=local_rank, local_world=per_node), "cpu", "gloo", 60)
    levels, node, lines = collectives.make_levels(ranks)
    rows = [row for level in levels for name in NAMES for row in collectives.measure(ranks, level, name, 1024, 0.001)]
    links = [collectives.fit([row for row in rows if row.level == level.name][:3], ranks.device) for level in levels]
    ranks.close()
    return [asdict(row) for row in rows], node, lines, links


def test_levels_and_rows_of_two_nodes() -> None:
    answers = run_ranks(4, measured, 2)
    rows, per_node, lines, links = answers[0]
    assert all(answer == answers[0] for answer in answers), "all ranks have the same numbers"
    assert (per_node, lines) == (2, [])
    assert {(row["level"], row["ranks"]) for row in rows} == {("inside", 2), ("across", 2), ("all", 4)}
    factors = {"all_reduce": lambda n: 2 * (n - 1) / n, "broadcast": lambda n: 1}
    for level in ("inside", "across", "all"):
        for name in NAMES:
            own = [row for row in rows if (row["level"], row["collective"]) == (level, name)]
            assert [row["bytes"] for row in own][:2] == [256, 512]
            for row in own:
                factor = factors.get(name, lambda n: (n - 1) / n)(row["ranks"])
                assert row["algbw"] == pytest.approx(row["bytes"] / row["seconds"])
                assert row["busbw"] == pytest.approx(row["algbw"] * factor)
                assert row["cpu_seconds"] >= 0
    assert all(link.latency_s >= 0 and link.bytes_per_s > 0 for link in links)


def unequal(place: Place) -> tuple[list[str], list[str]]:
    ranks = Ranks(replace(place, local_rank=0, local_world=place.rank + 1), "cpu", "gloo", 60)
    levels, _, lines = collectives.make_levels(ranks)
    ranks.close()
    return [level.name for level in levels], lines


def test_unequal_nodes_have_one_level() -> None:
    for names, lines in run_ranks(2, unequal):
        assert names == ["all"]
        assert lines[0].startswith("inside, across: not measured: nodes have unequal numbers of ranks")


def test_one_rank_has_no_links() -> None:
    levels, per_node, lines = collectives.make_levels(Ranks(Place(), "cpu", "gloo", 60))
    assert (levels, per_node) == ([], 1)
    assert lines == ["links: not measured: one rank sends nothing; give --devices=2, or start by torchrun"]


def test_bytes_are_cut_to_the_ranks() -> None:
    assert collectives.sizes(1000)[0] == 256 and collectives.sizes(1 << 20)[-1] == 1 << 20
    assert len(collectives.sizes(1)) == 2, "a line takes two"


def test_a_link_has_the_rates_of_other_collectives_as_shares() -> None:
    link, gather, scatter = Link(1e-5, 100.0, 0.0), Link(1e-5, 80.0, 0.0), Link(1e-5, 50.0, 0.0)
    assert collectives.with_shares(link, gather, scatter) == Link(1e-5, 100.0, 0.0, 0.8, 0.5)
    endless = Link(1e-5, math.inf, 0.0)
    assert collectives.with_shares(endless, gather, scatter) == endless
    assert collectives.with_shares(link, endless, link) == link
