"""Steps to equal loss, on curves whose answer is known."""

import math
import random

import pytest

from trainer.tools.tune.time_to_loss import difference, drift, fit, slowdown


def curve(a: float, b: float, c: float, steps: int = 60, noise: float = 0.0) -> list[float | None]:
    drawn = random.Random(0)
    return [a + b * (s + 1) ** -c + noise * drawn.gauss(0, 1) for s in range(steps)]


def test_a_curve_is_found_again() -> None:
    found = fit(curve(1.0, 2.0, 0.5))
    assert found is not None and found == pytest.approx((1.0, 2.0, 0.5), abs=1e-6)
    assert found.steps_to(2.0) == pytest.approx(3.0) and found.steps_to(0.99) == math.inf


def test_twice_as_many_steps() -> None:
    exact = curve(1.0, 2.0, 0.5, noise=0.01)
    halved: list[float | None] = [1.0 + 2.0 * (s / 2 + 1) ** -0.5 for s in range(60)]  # a step is half a step
    assert slowdown(exact, halved) == pytest.approx(2.0, rel=0.1)


def test_equal_curves_and_faster_ones_need_as_many_steps() -> None:
    assert slowdown(curve(1.0, 2.0, 0.5), curve(1.0, 2.0, 0.5)) == pytest.approx(1.0)
    assert slowdown(curve(1.0, 2.0, 0.5), curve(0.5, 2.0, 0.5)) == 1.0


def test_a_loss_that_is_not_reached_costs_much() -> None:
    assert slowdown(curve(1.0, 2.0, 0.5), curve(1.5, 2.0, 0.5)) == pytest.approx(60 / (2 / 0.7582) ** 2, rel=0.01)
    assert slowdown(curve(1.0, 2.0, 0.5), [None] * 60) == math.inf
    assert slowdown(curve(1.0, 2.0, 0.5, steps=4), curve(1.0, 2.0, 0.5, steps=4)) == math.inf  # too few to tell
    flat: list[float | None] = [3.0] * 60
    assert slowdown(flat, flat) == 1.0 and slowdown(flat, [4.0] * 60) == math.inf


def test_differences() -> None:
    assert difference([1.0, 2.0], [1.0, 2.2]) == pytest.approx(0.2 / 2.2)
    assert difference([None, 1.0], [None, 1.0]) == 0 and difference([1.0], [None]) == math.inf
    assert drift([2.0, 1.0], [2.0, 1.1]) == pytest.approx(0.1) and drift([1.0, 1.0], [1.0, 0.9]) == pytest.approx(-0.1)
