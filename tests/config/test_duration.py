"""Durations: what is typed, what it means in steps, and what is refused."""

import pytest
from support.messages import refuses

from trainer.config.duration import Duration
from trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        (200, 200, "steps"),
        ("200", 200, "steps"),
        ("200 steps", 200, "steps"),
        ("1 step", 1, "steps"),
        ("1_000steps", 1000, "steps"),
        ("2 epochs", 2, "epochs"),
        (" .5  epoch ", 0.5, "epochs"),
        ("1e6 samples", 1e6, "samples"),
        ("30 minutes", 30, "minutes"),
        ("0", 0, "steps"),
    ],
)
def test_parse(text, amount, unit):
    parsed = Duration.parse(text, "key")
    assert (parsed.amount, parsed.unit) == (amount, unit)
    assert Duration.parse(parsed, "key") is parsed


@pytest.mark.parametrize(
    "text",
    ["", "steps", "-1 steps", "-1", "5 parsecs", "5 stepss", "nan", "inf steps", "1.2.3", "1e5x", "5 s", "_", True],
)
def test_what_is_no_duration_is_refused_with_an_example(text):
    with pytest.raises(ConfigError) as refusal:
        Duration.parse(text, "trainer.validate_every")
    assert str(refusal.value) == (
        f"trainer.validate_every={text}: is not a duration; write for example trainer.validate_every='200 steps' "
        "(steps, epochs, samples, minutes)"
    )


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("7 steps", 7),
        ("7.5 steps", 8),
        ("96 samples", 3),
        ("97 samples", 4),
        ("1 samples", 1),
        ("0 samples", 0),
        ("1 epochs", 32),  # 1000 / 32 = 31.25
        ("2 epochs", 63),
        ("0.032 epochs", 1),
        ("16 epochs", 500),
    ],
)
def test_in_steps_rounded_up(text, steps):
    assert Duration.parse(text, "key").steps("key", batch=32, epoch_samples=1000) == steps


def test_minutes_are_not_steps():
    with refuses("trainer.max=5 minutes", "number"):
        Duration(5, "minutes").steps("trainer.max", 32, 1000)


def test_epochs_need_a_known_length():
    with refuses("trainer.max_epochs=2 epochs", "length"):
        Duration(2, "epochs").steps("trainer.max_epochs", 32, None)
    assert Duration(64, "samples").steps("key", 32, None) == 2


@pytest.mark.parametrize(("epochs", "steps"), [(1.1, 11), ("1.1", 11), ("2.3", 23), ("0.7", 7), ("1.1000001", 12)])
def test_amounts_are_the_decimals_that_were_written(epochs, steps):
    """Not the floats next to them: 1.1 * 100 is 110.00000000000001."""
    for duration in (Duration.parse(f"{epochs} epochs", "key"), Duration(float(epochs), "epochs")):
        assert duration.steps("key", batch=10, epoch_samples=100) == steps
