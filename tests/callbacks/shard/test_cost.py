"""Bytes of shard's card, and seconds by hand: ten units of 1 MiB, 2 samples of a rank."""

from dataclasses import replace

import pytest
from support.costs import CODECS, FAST, MIB, choose, machine, setup

from trainer.cost.machine import CodecCost, Link
from trainer.cost.passes import passes
from trainer.cost.setup import Setup, StepCost

UNITS = {"trainer__ddp__bucket_mib": 1}


def step(made: Setup) -> StepCost:
    cost = made.costs["shard"].step(made, passes(made), codec=True)
    assert cost is not None
    return cost


def found(own, micro: int = 2, **knobs: object):
    made = setup(own, choose({"shard": {"stage": 3, **knobs}}, **UNITS, micro_batch=micro))
    return step(made)


def test_bytes_are_the_card_s() -> None:
    size = 10 * MIB * 3 / 4  # (N - 1) / N P b
    assert found(machine(4)).sent_bytes == 3 * size
    assert found(machine(4), reshard=False).sent_bytes == 2 * size
    two = setup(machine(4), choose({"shard": {"stage": 3}}, **UNITS, micro_batch=1), batch=8)
    assert step(two).sent_bytes == 5 * size  # each micro-batch gathers twice


def test_a_hybrid_gathers_on_its_node() -> None:
    hybrid = found(machine(8, 4, FAST), hybrid=True)
    assert hybrid.sent_bytes == pytest.approx(3 * 10 * MIB * 3 / 4 + 10 * MIB / 4)


def test_a_fast_link_hides_all() -> None:
    assert found(machine(2, across=FAST)).seconds == pytest.approx(0.6 + 0.01 / 2)


def test_what_gloo_gathers_is_hidden_by_nothing() -> None:
    own = replace(machine(2, across=Link(0.0, MIB / 2 / 0.01, 0.0)), background=False)
    assert found(own).seconds == pytest.approx(0.6 + 0.01 / 2 + 30 * 0.01)
    assert found(own, reshard=False).seconds == pytest.approx(0.6 + 0.01 / 2 + 20 * 0.01)


def test_a_slow_link_decides() -> None:
    """A gather or a scatter takes 0.1 s, half of an all-reduce: 30 of them, and the last unit's backward pass."""
    slow = found(machine(2, across=Link(0.0, MIB / 2 / 0.1, 0.0)))
    assert 3.0 <= slow.seconds <= 3.2
    kept = found(machine(2, across=Link(0.0, MIB / 2 / 0.1, 0.0)), reshard=False)
    assert 2.0 <= kept.seconds <= 2.2


def test_owners_gather_their_weights() -> None:
    """The fullest of 4 owners has 3 of 10 equal parameters, and each rank sends as much."""
    found = setup(machine(4, codecs={**CODECS, "none": CodecCost(1e-9, 1e-9)}), choose({"shard": {}}))
    cost = found.costs["shard"].added(found, passes(found))
    assert cost.sent_bytes == 0.75 * 12 * MIB
    assert cost.seconds == pytest.approx(cost.sent_bytes / 1e6 + 2 * 10 * MIB * 1e-9)
    assert found.stepped == 0.3 and passes(found).optimizer_s == pytest.approx(0.3 * 0.01)


def test_a_gather_that_nothing_hides_may_be_limited_by_the_processor() -> None:
    found = setup(machine(4, across=Link(0.0, 1e6, 2e-6), cores=0.5), choose({"shard": {}}))
    cost = found.costs["shard"].added(found, passes(found))
    assert cost.seconds == pytest.approx(0.75 * 12 * MIB * 2 * 2e-6 / 0.5)
