"""Compares lossy training with exact training at equal loss: how many more steps it needs, by fitted curves."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

POWERS = tuple(0.1 * i for i in range(1, 21))  # candidates for c
FEWEST = 8  # steps: a fit of three numbers to fewer says nothing


class Curve(NamedTuple):
    """The loss after `s` steps, `a + b (s + 1) ** -c`, as in scaling laws (Hestness et al. 2017, arXiv:1712.00409)."""

    a: float
    b: float
    c: float

    def at(self, step: float) -> float:
        return self.a + self.b * (step + 1) ** -self.c

    def steps_to(self, loss: float) -> float:
        """Return the steps to a loss; infinity if the curve never reaches it."""
        if self.b <= 0 or loss <= self.a:
            return math.inf
        return max(0.0, ((loss - self.a) / self.b) ** (-1 / self.c) - 1)


def fit(losses: Sequence[float | None]) -> Curve | None:
    """Fit a curve by least squares; None for fewer than `FEWEST` steps, or losses that are not finite."""
    values = np.array([math.nan if loss is None else loss for loss in losses], dtype=float)
    if len(values) < FEWEST or not np.isfinite(values).all():
        return None
    best, least = None, math.inf
    for c in POWERS:
        columns = np.stack([np.ones(len(values)), np.arange(1.0, len(values) + 1) ** -c], axis=1)
        (a, b), *_ = np.linalg.lstsq(columns, values, rcond=None)
        error = float(((columns @ (a, b) - values) ** 2).sum())
        if error < least:
            best, least = Curve(float(a), float(b), c), error
    return best


def slowdown(exact: Sequence[float | None], lossy: Sequence[float | None]) -> float:
    """Return the steps of lossy training per step of exact training, at the loss at the lossy run's end.

    The ratio is at least 1, because a short run that is ahead by chance proves no gain. The exact curve is read within
    its measured steps. Infinity means that a loss is not finite, or that the runs are too short to decide.
    """
    base, own = fit(exact), fit(lossy)
    if base is None or own is None:
        return math.inf
    last = len(exact) - 1
    reached = own.at(last)
    if base.b <= 0:  # the exact loss does not fall yet: then equal steps are compared
        return 1.0 if reached <= base.at(last) + noise(exact, base) else math.inf
    return max(1.0, (last + 1) / (base.steps_to(reached) + 1))


def noise(losses: Sequence[float | None], curve: Curve) -> float:
    errors = [(loss or 0.0) - curve.at(step) for step, loss in enumerate(losses)]
    return math.sqrt(sum(error**2 for error in errors) / max(1, len(errors) - 3) / len(errors))


def difference(one: Sequence[float | None], other: Sequence[float | None]) -> float:
    """Return the largest relative difference of two loss curves; infinity where only one is finite."""
    worst = 0.0
    for a, b in zip(one, other):
        if a is None and b is None:
            continue
        if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
            return math.inf
        worst = max(worst, abs(a - b) / max(abs(a), abs(b), 1e-12))
    return worst


def drift(one: Sequence[float | None], other: Sequence[float | None]) -> float:
    """Return how much larger the mean loss of the last half of `other` is, as a share."""
    halves = [[loss for loss in losses[len(losses) // 2 :] if loss is not None] for losses in (one, other)]
    if not all(halves) or not all(math.isfinite(loss) for half in halves for loss in half):
        return math.inf
    own, others = (sum(half) / len(half) for half in halves)
    return (others - own) / max(abs(own), 1e-12)
