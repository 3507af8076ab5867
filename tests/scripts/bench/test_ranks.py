"""Simulated ranks: sums are right on each, messages grow with the logarithm, checkpoints with the parts."""

import math

import pytest

from scripts.bench.ranks import agree, checkpoint, start_up


@pytest.mark.parametrize("world", [2, 33, 64, 70])
def test_an_agreement_takes_rounds_by_the_logarithm_and_40_bytes_each(world: int) -> None:
    found = agree(world)  # which compares the sums of all ranks
    rounds = math.floor(math.log2(world)) + (world & (world - 1) > 0)
    assert (found["messages of a rank"], found["bytes of a rank"]) == (rounds, 40 * rounds)


@pytest.mark.slow
def test_an_agreement_of_a_thousand_ranks() -> None:
    assert agree(1024)["messages of a rank"] == 10


def test_settings_grow_with_the_ranks_alone() -> None:
    few, many = start_up(8), start_up(64)
    assert many["bytes that a rank gets"] == 8 * few["bytes that a rank gets"]


@pytest.mark.parametrize("world", [24, pytest.param(4096, marks=pytest.mark.slow)])
def test_a_checkpoint_of_parts_has_two_files_a_rank_and_keeps_none_open(world: int) -> None:
    found = checkpoint(world)
    assert found["files"] == 2 * world + 1 and found["files held open"] == 0 and found["mappings"] <= world + 16
