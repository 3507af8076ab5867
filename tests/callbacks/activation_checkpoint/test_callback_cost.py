"""Recomputed passes, and the activations that stay."""

import pytest
from support.costs import choose, machine, setup

from trainer.cost.memory import activations
from trainer.cost.passes import passes


@pytest.mark.parametrize(
    ("knobs", "expected"), [({}, 0.8), ({"every": 2}, 0.7), ({"policy": "offload"}, 0.6), ({"budget": 0.75}, 0.65)]
)
def test_recomputed_passes(knobs: dict[str, object], expected: float) -> None:
    found = passes(setup(machine(), choose({"activation_checkpoint": knobs})))
    assert found.compute_s == pytest.approx(expected)
    ends = setup(machine(), choose({"activation_checkpoint": knobs}), parts=(0.25, 0.3, 0.2, 0.25))  # run once
    assert passes(ends).compute_s == pytest.approx((0.6 + expected) / 2)


@pytest.mark.parametrize(("knobs", "share"), [({}, 0.1), ({"every": 2}, 0.55), ({"budget": 0.3}, 0.3)])
def test_activations_that_stay(knobs: dict[str, object], share: float) -> None:
    own = setup(machine(1), choose({"activation_checkpoint": knobs}), batch=8)
    assert activations(own) == pytest.approx(8 * 1000 * share)
