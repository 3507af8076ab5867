"""Tracks the speeds of unequal ranks, and splits a batch accordingly."""

from collections.abc import Mapping, Sequence
from typing import Any

JUMP = 0.15  # a larger relative deviation from the average is a change of speed, not noise
GAIN = 0.02  # fraction of the step's time that new shares must save


def follow(speeds: Sequence[float], measured: Sequence[float], smoothing: float) -> list[float]:
    """Return the moving averages of the ranks' speeds. The average of a rank whose speed has changed restarts."""
    return [
        new if abs(new - old) > JUMP * old else smoothing * old + (1 - smoothing) * new
        for old, new in zip(speeds, measured, strict=True)
    ]


def cut_again(
    before: Mapping[str, Any], batch: int, speeds: Sequence[float], held: Sequence[int], least: int
) -> dict[str, Any]:
    """Return the shares and micro-batches for these speeds, or those of `before` unless new ones save `GAIN`.

    `held` has the largest micro-batch that fits on each rank, and `least` is the smallest share in samples.
    """
    shares = cut_shares(batch, speeds, least)
    if slowest(shares, speeds) > (1 - GAIN) * slowest(before["shares"], speeds):
        return keep(before, held)
    return with_micros(shares, held)


def keep(value: Mapping[str, Any], held: Sequence[int]) -> dict[str, Any]:
    """Return the same shares, with more micro-batches if the current ones do not fit on some rank."""
    if fit(value, held):
        return {"shares": value["shares"], "micros": value["micros"]}
    return with_micros(value["shares"], held)


def with_micros(shares: Sequence[int], held: Sequence[int]) -> dict[str, Any]:
    return {"shares": list(shares), "micros": [-(-share // most) for share, most in zip(shares, held, strict=True)]}


def fit(value: Mapping[str, Any], held: Sequence[int]) -> bool:
    return all(-(-share // n) <= most for share, n, most in zip(value["shares"], value["micros"], held, strict=True))


def cut_shares(batch: int, speeds: Sequence[float], least: int = 1) -> list[int]:
    """Return the samples per rank, at least `least`, so that the slowest rank's time is close to the minimum.

    Shares start in proportion to the speeds, rounded down. Single samples are then added or removed where that helps
    most, at the first of equal ranks. The arithmetic is IEEE's, so all ranks compute the same shares.
    """
    total = sum(speeds)
    shares = [max(least, int(batch * speed / total)) for speed in speeds]
    ranks = range(len(shares))
    for _ in range(sum(shares) - batch):
        shares[max((r for r in ranks if shares[r] > least), key=lambda r: shares[r] / speeds[r])] -= 1
    for _ in range(batch - sum(shares)):
        shares[min(ranks, key=lambda r: (shares[r] + 1) / speeds[r])] += 1
    return shares


def slowest(shares: Sequence[int], speeds: Sequence[float]) -> float:
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))
