"""Fits latency and bandwidth of a link to the times of a collective, by robust least squares."""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from trainer.comm.bandwidth import BUS_FACTORS, HOPS
from trainer.cost.machine import Link

HUBER = 1.345  # standard deviations up to which a residual counts by its square (Huber 1964): 95 % efficiency
TURNS = 50  # of reweighting; it settles in fewer than ten
LONG = 64  # sizes of at least this part of the largest give the rate: caches and protocols change it with the size


def fit_link(
    times: Mapping[int, float], ranks: int, collective: str = "all_reduce", cpu: Mapping[int, float] | None = None
) -> Link:
    """Fit `seconds = hops * latency + sent bytes / rate`.

    Args:
        times: Bytes of a collective, as nccl-tests counts them, -> seconds.
        cpu: Bytes -> CPU seconds of a rank; None: the link's cost is 0.
    """
    if ranks < 2 or len(times) < 2:
        raise ValueError(f"fit_link: {len(times)} size(s) on {ranks} rank(s); a link takes two sizes and two ranks")
    factor = BUS_FACTORS[collective](ranks)
    start, slope = fit_line(times)
    cost = fit_line(cpu)[1] / factor / 2 if cpu else 0.0  # each byte that a rank sends, another one receives
    return Link(start / HOPS[collective](ranks), factor / slope if slope else math.inf, cost)


def fit_line(points: Mapping[int, float]) -> tuple[float, float]:
    """Return `start` and `slope` of `y = start + slope * x`, both at least 0.

    The slope is fitted to the long sizes alone, by least squares of relative errors with Huber's weights, so an outlier
    moves it little. The start is the median remainder of the short sizes, in which it dominates.
    """
    x, y = np.array(sorted(points.items()), dtype=float).T
    y = np.maximum(y, 1e-12)
    long = max(2, int((x * LONG >= x[-1]).sum()))
    slope = max(0.0, _huber(x[-long:], y[-long:])[1])
    left = y - slope * x
    short = max(1, int(np.argmin(left >= y / 2)) if (left < y / 2).any() else len(x))
    return max(0.0, float(np.median(left[:short]))), slope


def _huber(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Return the line (start, slope) with the least relative errors, by iteratively reweighted least squares."""
    line, columns = np.zeros(2), np.stack([1 / y, x / y], axis=1)
    weights = np.ones_like(y)
    for _ in range(TURNS):
        root, before = np.sqrt(weights), line
        line = np.linalg.lstsq(columns * root[:, None], root, rcond=None)[0]
        errors = np.abs(columns @ line - 1)
        bound = max(HUBER * 1.4826 * float(np.median(errors)), 1e-6)
        weights = np.minimum(1.0, bound / np.maximum(errors, 1e-12))
        if np.allclose(line, before, rtol=1e-9, atol=0):
            break
    start, slope = line.tolist()
    return start, slope
