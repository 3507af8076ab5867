"""A step of overlap by hand. Ten layers of 1 MiB; 2 samples a rank take 0.2 s forward, 0.4 s backward."""

import pytest
from support.costs import FAST, MIB, choose, machine, setup

from trainer.cost.machine import Link
from trainer.cost.passes import in_step, passes


def seconds(link: Link, **settings: object) -> float:
    found = setup(machine(across=link), choose({"overlap": {}}, **settings))
    return in_step(found, passes(found), codec=True)


def link(each_s: float) -> Link:
    """Return a link that takes `each_s` for the all-reduce of a MiB between two ranks."""
    return Link(0.0, MIB / each_s, 0.0)


def test_a_fast_link_adds_nothing() -> None:
    assert seconds(FAST) == pytest.approx(0.61, abs=1e-6)


def test_overlap_hides_behind_the_next_forward_pass_too() -> None:
    """The link rests only while layers 8 and 9 step, layer 9 runs backward and the next bucket is not ready."""
    assert seconds(link(0.1), trainer__ddp__bucket_mib=1) == pytest.approx(1.0 + 2 * 0.021 + 0.04)


def test_overlap_waits_for_the_layer_that_is_ready_last_and_needed_first() -> None:
    """The link takes 0.05 s a layer, the backward pass 0.04 s. At its end, layer 1 needs 0.04 s, layer 0 0.05 s."""
    assert seconds(link(0.05), trainer__ddp__bucket_mib=1) == pytest.approx(0.61 + 0.04 + 0.05)


def test_overlap_waits_in_the_first_forward_pass_of_a_step() -> None:
    """Of three micro-batches of a sample, the first waits. The link rests while the others run."""
    found = setup(
        machine(across=link(0.1)), choose({"overlap": {}}, trainer__ddp__bucket_mib=1, micro_batch=1), batch=6
    )
    rests_s = 2 * 0.011 + (3 * 0.3 - 0.1 - 0.2) + 0.02
    assert in_step(found, passes(found), codec=True) == pytest.approx(1.0 + rests_s)
