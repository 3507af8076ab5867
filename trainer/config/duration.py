"""Parses durations: "200 steps", "2 epochs", "1e6 samples", "30 minutes"; a bare number is steps."""

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

from trainer.errors import ConfigError

UNITS = ("steps", "epochs", "samples", "minutes")


@dataclass(frozen=True)
class Duration:
    amount: float
    unit: str = "steps"

    @classmethod
    def parse(cls, text: "str | int | Duration", key: str) -> "Duration":
        if isinstance(text, Duration):
            return text
        match = re.fullmatch(r"\s*([0-9._]+(?:e[0-9]+)?)\s*([a-z]*)\s*", str(text))
        unit = next((u for u in UNITS if match and u in (match[2] or "steps", f"{match[2]}s")), "")
        amount = -1.0
        with suppress(ValueError):
            amount = float(match[1]) if match else -1.0
        if not 0 <= amount < math.inf or not unit:
            raise ConfigError(
                f"{key}={text}: is not a duration; write for example {key}='200 steps' ({', '.join(UNITS)})"
            )
        return cls(amount, unit)

    def steps(self, key: str, batch: int, epoch_samples: int | None) -> int:
        """Convert to optimizer steps, rounded up. `batch` is the global batch, in samples."""
        return math.ceil(self.samples(key, batch, epoch_samples) / batch)

    def samples(self, key: str, batch: int, epoch_samples: int | None) -> Fraction:
        """Convert to samples; a ConfigError for minutes, and for epochs if the data's length is unknown."""
        if self.unit == "minutes":
            raise ConfigError(
                f"{key}={self}: must be a number of steps known before the run; give steps, samples or epochs"
            )
        if self.unit == "epochs" and epoch_samples is None:
            raise ConfigError(f"{key}={self}: this recipe's data has no known length; give steps or samples")
        amount = Fraction(str(self.amount))  # as written: the float 1.1 is a little more
        return amount * {"steps": batch, "samples": 1, "epochs": epoch_samples or 0}[self.unit]

    def __str__(self) -> str:
        return f"{self.amount:g} {self.unit}"


class Periods:
    """Periods of equal length. A period ends at the first step whose position reaches its end.

    `position` returns a step's position in the run, in steps or in samples. `length`, more than 0, and `start` of the
    first period have the same unit.
    """

    def __init__(self, position: Callable[[int], int], length: Fraction, start: Fraction = Fraction(0)) -> None:
        self.position, self.scale = position, math.lcm(length.denominator, start.denominator)
        self.length, self.start = int(length * self.scale), int(start * self.scale)  # a step compares whole numbers

    def passed(self, step: int) -> int:
        """Return the number of periods that have ended by a step; negative before the start."""
        return (self.position(step) * self.scale - self.start) // self.length

    def next_end(self, step: int) -> Fraction:
        """Return the position of the next end, or start, after a step."""
        return Fraction(self.start + (self.passed(step) + 1) * self.length, self.scale)

    def end_at(self, step: int) -> bool:
        """Return whether a period starts or ends at this step, and not at the one before."""
        return self.passed(step) > self.passed(step - 1)
