"""A known link is found again: exactly without noise, and within the noise's size with wrong times among the times."""

import numpy as np
import pytest

from trainer.tools.measure.collectives import sizes
from trainer.tools.measure.fit import fit_line, fit_link

SIZES = sizes(64 << 20)
LATENCY_S, RATE = 1e-4, 12e6


def seconds(ranks: int, collective: str) -> dict[int, float]:
    """By hand, as Thakur et al. have a ring and a binomial tree."""
    hops = {"all_reduce": 2 * (ranks - 1), "all_gather": ranks - 1, "reduce_scatter": ranks - 1}
    share = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}
    trees = {2: 1, 3: 2, 4: 2, 8: 3}
    return {
        size: hops.get(collective, trees[ranks]) * LATENCY_S + share.get(collective, (ranks - 1) / ranks) * size / RATE
        for size in SIZES
    }


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_a_link_is_found_again(collective: str, ranks: int) -> None:
    cpu = {size: 1e-5 + 3e-9 * size for size in SIZES}
    link = fit_link(seconds(ranks, collective), ranks, collective, cpu)
    share = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(collective, (ranks - 1) / ranks)
    assert link.bytes_per_s == pytest.approx(RATE, rel=1e-6)
    assert link.latency_s == pytest.approx(LATENCY_S, rel=0.01)
    assert link.cpu_s_per_byte == pytest.approx(3e-9 / share / 2, rel=1e-6)


@pytest.mark.parametrize("wrong", range(len(SIZES)))
def test_a_wrong_time_moves_it_little(wrong: int) -> None:
    """Any one time is five times too long, and all have 2 % of noise."""
    random = np.random.default_rng(wrong)
    times = {size: value * random.normal(1, 0.02) for size, value in seconds(2, "all_reduce").items()}
    times[SIZES[wrong]] *= 5
    link = fit_link(times, 2)
    assert link.bytes_per_s == pytest.approx(RATE, rel=0.05)
    assert link.latency_s == pytest.approx(LATENCY_S, rel=0.35)


def test_a_burst_that_the_link_lets_pass_does_not_count() -> None:
    times = {size: 2 * LATENCY_S + max(0, size - 131072) / RATE for size in SIZES}
    assert fit_link(times, 2).bytes_per_s == pytest.approx(RATE, rel=0.001)


def test_a_line_never_falls() -> None:
    assert fit_line({100: 2.0, 200: 1.0}) == (1.5, 0.0)
    start, slope = fit_line({100: 0.5, 200: 2.0})
    assert start == 0.0 and slope > 0


def test_too_little_is_refused() -> None:
    for times, ranks in (({1024: 1e-3}, 2), ({1024: 1e-3, 2048: 2e-3}, 1)):
        with pytest.raises(ValueError, match=r"^fit_link: \d size\(s\) on \d rank\(s\)"):
            fit_link(times, ranks)
