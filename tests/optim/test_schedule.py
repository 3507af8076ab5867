"""Schedules at their knots, by hand: 110 steps of which 10 warm up, so that step 10 + n is at n % of the rest."""

import math
import random

import pytest
from support.messages import refuses
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError
from trainer.log import log
from trainer.optim.factories import sgd
from trainer.optim.schedule import SWA, Constant, Cosine, Cyclic, Linear, OneCycle, Schedule
from trainer.process.environment import Place
from trainer.trainer import Trainer

EACH = (Constant, Linear, Cosine, OneCycle, Cyclic, SWA)
WARMUP, TOTAL = 10, 110


def rate(schedule: Schedule, batch: int = 256):
    return schedule.resolve(TOTAL, batch, None)


@pytest.mark.parametrize(
    ("schedule", "knots"),
    [
        (Constant(WARMUP), {0: 0.1, 9: 1.0, 10: 1.0, 60: 1.0, 109: 1.0, 10**6: 1.0}),
        (Linear(WARMUP), {0: 0.1, 9: 1.0, 10: 1.0, 35: 0.75, 60: 0.5, 109: 0.01, 110: 0.0, 500: 0.0}),
        (Linear(WARMUP, floor=0.2), {10: 1.0, 60: 0.6, 109: 0.208, 500: 0.2}),
        (Cosine(WARMUP), {0: 0.1, 10: 1.0, 35: 0.5 + math.sqrt(0.125), 60: 0.5, 85: 0.5 - math.sqrt(0.125), 110: 0.0}),
        (Cosine(WARMUP, floor=0.2), {10: 1.0, 60: 0.6, 110: 0.2}),
        (SWA(WARMUP, start=0.8, annealing=0.4, floor=0.2), {0: 0.1, 10: 1.0, 50: 1.0, 70: 0.6, 90: 0.2, 110: 0.2}),
    ],
    ids=str,
)
def test_values_at_the_knots(schedule, knots):
    assert {step: rate(schedule)(step) for step in knots} == pytest.approx(knots, abs=1e-12)


def test_one_cycle_by_hand():
    """110 steps without warm-up; the rise ends at 0.5 of them."""
    factor = rate(OneCycle(rise=0.5, start=0.1, floor=0.02))
    assert factor(0) == pytest.approx(0.1)
    assert factor(55) == pytest.approx(1.0)
    assert factor(27) == pytest.approx(0.1 + 0.9 * 0.5 * (1 - math.cos(math.pi * 27 / 55)))
    assert factor(110) == pytest.approx(0.02)
    rising, falling = [factor(step) for step in range(56)], [factor(step) for step in range(55, 110)]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)


def test_cyclic_by_hand():
    """Two triangles in 110 steps: floor at 0 and 55, peak at 27.5."""
    factor = rate(Cyclic(cycles=2, floor=0.1))
    slope = 0.9 / 27.5
    knots = {0: 0.1, 11: 0.1 + 11 * slope, 27: 1 - 0.5 * slope, 28: 1 - 0.5 * slope, 44: 0.1 + 11 * slope, 55: 0.1}
    knots |= {step + 55: value for step, value in knots.items()}
    assert {step: factor(step) for step in knots} == pytest.approx(knots)


@pytest.mark.parametrize("kind", EACH)
def test_warm_up_ends_where_the_shape_begins(kind):
    """Without a jump: ten equal steps from 0, the tenth the shape's first value."""
    factor, first = rate(kind(warmup=WARMUP)), rate(kind())(0)
    assert [factor(step) for step in range(11)] == pytest.approx([first * n / 10 for n in range(1, 11)] + [first])


@pytest.mark.parametrize("kind", EACH)
def test_a_pure_function_of_the_step(kind):
    one, other = rate(kind(warmup=WARMUP)), rate(kind(warmup=WARMUP))
    straight = [one(step) for step in range(TOTAL)]
    steps = list(range(TOTAL))
    random.Random(0).shuffle(steps)
    assert {step: other(step) for step in steps} == dict(enumerate(straight))
    assert [one(step) for step in range(TOTAL)] == straight


@pytest.mark.parametrize(("scaling", "scale"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_lr_scaling_with_the_batch(scaling, scale):
    factor = rate(Linear(WARMUP, scaling, reference_batch=256), batch=1024)
    assert [factor(step) for step in (0, 10, 60)] == pytest.approx([scale * 0.1, scale, scale * 0.5])


@pytest.mark.parametrize(
    ("warmup", "steps"), [(0, 0), ("7 steps", 7), ("320 samples", 10), ("321 samples", 11), ("1 epochs", 25)]
)
def test_warm_up_is_a_duration(warmup, steps):
    assert Constant(warmup).resolve(None, 32, 800).warmup == steps


def test_warm_up_in_minutes_is_refused():
    with refuses("schedule.warmup=5 minutes", "number"):
        Constant("5 minutes").resolve(None, 32, None)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Linear, "linear"), (Cosine, "cosine"), (OneCycle, "one_cycle"), (Cyclic, "cyclic"), (SWA, "swa")],
)
def test_an_open_end_is_refused_by_all_but_constant(kind, name):
    with pytest.raises(ConfigError, match=rf"trainer\.max_steps=null: schedule={name} must know the end.*max_epochs"):
        kind().resolve(None, 32, 800)
    Constant().resolve(None, 32, 800)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"start": 1.5}, "schedule.start=1.5: must be at most 1"),
        ({"annealing": math.inf}, "schedule.annealing=inf: must be less than inf"),
        ({"start": 0.3, "annealing": 0.4}, "schedule.annealing=0.4: must be at most schedule.start=0.3"),
    ],
)
def test_shares_of_the_run_that_cannot_be(knobs, message):
    with pytest.raises(ConfigError, match=message):
        SWA(**knobs)


@pytest.mark.parametrize("kind", [Linear, Cosine, OneCycle, Cyclic, SWA])
@pytest.mark.parametrize("floor", [-1, -1e-9, 1.5, math.nan, math.inf])
def test_a_floor_outside_of_the_peak_is_refused(kind, floor):
    """A negative one trained with negative rates; NaN ended the run with weights that are not finite."""
    with pytest.raises(ConfigError, match=rf"^schedule.floor={floor}: must be "):
        kind(floor=floor)


def test_a_schedule_without_a_shape_is_refused():
    with refuses("schedule=Schedule()", "Constant()"):
        Schedule().resolve(10, 12, 96)


class Rates(Callback):
    def on_fit_start(self, trainer) -> None:
        self.seen: list[list[float]] = []

    def on_before_optimizer_step(self, trainer) -> None:
        self.seen.append([group["lr"] for group in trainer.optimizer.param_groups])


def test_the_optimizer_gets_the_rate_of_its_step(tmp_path):
    rates = Rates()
    Trainer(
        Toy(),
        {"rates": rates},
        lambda groups: sgd([{**group, "lr": 0.5 * (i + 1)} for i, group in enumerate(groups)]),
        Linear(warmup=2),
        batch=12,
        options=Options(max_steps=6),
        data=DataOptions(workers=0),
        place=Place(),
    ).fit()
    factors = [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates.seen == [pytest.approx([0.5 * factor, 1.0 * factor]) for factor in factors]


def test_a_warm_up_longer_than_the_run_is_told(caplog, monkeypatch):
    monkeypatch.setattr(log, "propagate", True)
    Linear(warmup=6).resolve(6, 8, None)
    assert not caplog.messages
    Linear(warmup=7).resolve(6, 8, None)
    assert caplog.messages == ["schedule.warmup=7: the run ends at step 6, before the rate has its peak"]
