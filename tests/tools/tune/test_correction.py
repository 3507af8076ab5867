"""Corrections of the cost model: which term is wrong follows from trials that differ in it."""

import math
from dataclasses import replace

import pytest

from trainer.cost.machine import Link, Machine
from trainer.cost.workload import Choice, Workload
from trainer.tools.cost_model.predict import predict
from trainer.tools.tune.candidates import family
from trainer.tools.tune.correction import Model, descend, in_words, robust

LINK = Link(50e-6, 2e7, 1e-10)
MACHINE = Machine(4, 1, 1.0, LINK, LINK, {}, None, 1e9)
WORK = Workload((250_000,) * 40, 0.01, 0.02, 0.005, 0.02, 0.001, 1e-5, 1e6, 1.6e8)
CHOICES = [Choice({}, {"micro_batch": 10}), Choice({"overlap": {}}, {"micro_batch": 5}), Choice({}, {"micro_batch": 2})]


def model(machine: Machine = MACHINE, work: Workload = WORK) -> Model:
    return Model(machine, work, 40, 1.0, lambda choice: choice, family)


def measured(machine: Machine = MACHINE, work: Workload = WORK) -> list[tuple[Choice, float]]:
    return [(choice, predict(machine, work, choice, 40).step_s) for choice in CHOICES]


def test_true_predictions_stay_as_they_are() -> None:
    corrected = model().correct(measured())
    assert all(abs(value) < 0.03 for value in (*corrected.factors.values(), *corrected.residuals.values()))
    assert not in_words(corrected.factors)


def test_a_slow_link_is_told_from_slow_passes() -> None:
    slow = replace(MACHINE, across=Link(50e-6, 0.5e7, 1e-10))
    by_link = model().correct(measured(slow))
    assert by_link.factors["across"] > 0.9 and abs(by_link.factors["compute"]) < 0.2
    assert "the link across: " in in_words(by_link.factors)
    passes = replace(WORK, forward_s=0.02, backward_s=0.04, pass_s=0.01)
    by_passes = model().correct(measured(work=passes))
    assert by_passes.factors["compute"] > by_passes.factors["across"]


@pytest.mark.parametrize("share", [0.25, 4.0])
def test_corrected_predictions_are_those_measured(share: float) -> None:
    other = replace(MACHINE, across=Link(50e-6 / share, share * LINK.bytes_per_s, 1e-10))
    corrected = model().correct(measured(other))
    for choice, seconds in measured(other):
        assert corrected.predict(choice).step_s == pytest.approx(seconds, rel=0.08)
    parts = corrected.predict(CHOICES[0])
    assert sum(parts.parts.values()) == pytest.approx(parts.step_s)


def test_a_family_has_a_residual_of_its_own() -> None:
    trials = measured()
    trials[1] = (trials[1][0], 1.3 * trials[1][1])  # the model knows no reason for it
    corrected = model().correct(trials)
    assert corrected.residuals[family(CHOICES[1])] > 0.05
    assert corrected.predict(CHOICES[0]).step_s == pytest.approx(trials[0][1], rel=0.05)


def test_descent_finds_the_least_value() -> None:
    found = descend(lambda at: (at["x"] - 0.7) ** 2 + (at["y"] + 0.3) ** 2, {"x": 0.0, "y": 0.0})
    assert found["x"] == pytest.approx(0.7, abs=0.03) and found["y"] == pytest.approx(-0.3, abs=0.03)
    assert robust(2.0) == 4.0 and robust(-10.0) == 51.0 and math.isclose(robust(3.0), robust(3.0 + 1e-12))
