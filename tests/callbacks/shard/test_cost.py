"""Bytes of shard's card, and seconds by hand: ten units of 1 MiB, 2 samples of a rank."""

from dataclasses import replace

import pytest
from support.costs import FAST, MIB, choose, machine, setup

from trainer.tools.cost_model.fsdp import fsdp
from trainer.cost.machine import Link
from trainer.cost.passes import passes

UNITS = {"trainer__ddp__bucket_mib": 1}


def found(own, micro: int = 2, **knobs: object):
    made = setup(own, choose({"shard": {"stage": 3, **knobs}}, **UNITS, micro_batch=micro))
    return fsdp(made, passes(made))


def test_bytes_are_the_card_s() -> None:
    size = 10 * MIB * 3 / 4  # (N - 1) / N P b
    assert found(machine(4)).sent_bytes == 3 * size
    assert found(machine(4), reshard=False).sent_bytes == 2 * size
    two = setup(machine(4), choose({"shard": {"stage": 3}}, **UNITS, micro_batch=1), batch=8)
    assert fsdp(two, passes(two)).sent_bytes == 5 * size  # each micro-batch gathers twice


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
