"""The step of DDP by hand. Ten layers of 1 MiB; 2 samples a rank take 0.2 s forward, 0.4 s backward."""

import pytest
from support.costs import FAST, MIB, choose, machine, setup

from trainer.cost.machine import Link
from trainer.cost.passes import in_step, passes


def seconds(own, callbacks: dict[str, dict[str, object]] | None = None, **settings: object) -> float:
    found = setup(own, choose(callbacks, **settings))
    return in_step(found, passes(found), codec=True)


def link(each_s: float, cpu_s: float = 0.0) -> Link:
    """Return a link that takes `each_s` for the all-reduce of a MiB between two ranks."""
    return Link(0.0, MIB / each_s, cpu_s / 2 / MIB)


def test_a_fast_link_adds_nothing() -> None:
    assert seconds(machine(across=FAST)) == pytest.approx(0.61, abs=1e-6)


def test_buckets_are_sent_beside_the_backward_pass() -> None:
    """With 0.04 s of the backward pass each, buckets that take 0.03 s leave the last one exposed."""
    assert seconds(machine(across=link(0.03)), trainer__ddp__bucket_mib=1) == pytest.approx(0.61 + 0.03)


def test_a_slow_link_is_busy_from_the_first_bucket_on() -> None:
    assert seconds(machine(across=link(0.1)), trainer__ddp__bucket_mib=1) == pytest.approx(0.2 + 0.04 + 10 * 0.1 + 0.01)


def test_one_bucket_hides_nothing() -> None:
    assert seconds(machine(across=link(0.1)), trainer__ddp__bucket_mib=99) == pytest.approx(0.61 + 1.0)


def test_a_core_is_needed_by_both() -> None:
    """A link that takes half a core, and all of the backward pass: on one core the pass takes longer."""
    slow, fast = (seconds(machine(across=link(0.03, 0.015), cores=n), trainer__ddp__bucket_mib=1) for n in (1.0, 2.0))
    assert fast == pytest.approx(0.64) and slow == pytest.approx(fast + 9 * 0.015)


def test_only_the_last_micro_batch_reduces() -> None:
    plain = seconds(machine(across=link(0.1)), trainer__ddp__bucket_mib=1, micro_batch=1)
    assert plain == pytest.approx(0.3 + 0.1 + 0.02 + 10 * 0.1 + 0.01)


def test_the_fixed_part_of_a_pass() -> None:
    small = setup(machine(), choose(micro_batch=1), pass_s=0.1)
    assert passes(small).compute_s == pytest.approx(0.6 + 2 * 0.1)
    again = setup(machine(), choose({"activation_checkpoint": {}}, micro_batch=1), pass_s=0.1)
    assert passes(again).compute_s == pytest.approx(0.8 + 2 * 0.1 * 4 / 3)  # the forward pass has a third of it
