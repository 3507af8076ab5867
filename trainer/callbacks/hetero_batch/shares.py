"""Follows the speeds of unequal ranks, and cuts a batch by them."""

from collections.abc import Mapping, Sequence
from typing import Any

JUMP = 0.15  # a speed that differs from its average by more has changed, and is no noise
GAIN = 0.02  # part of the step's time that other shares must save


def follow(speeds: Sequence[float], measured: Sequence[float], smoothing: float) -> list[float]:
    """Return the moving averages of the ranks' speeds. The average of a rank that has changed restarts.

    Args:
        speeds: The averages before.
        smoothing: Weight of the past.
    """
    return [
        new if abs(new - old) > JUMP * old else smoothing * old + (1 - smoothing) * new
        for old, new in zip(speeds, measured, strict=True)
    ]


def cut_again(
    before: Mapping[str, Any], batch: int, speeds: Sequence[float], held: Sequence[int], least: int
) -> dict[str, Any]:
    """Return the shares and the micro-batches for these speeds; those of `before`, unless others save `GAIN`.

    Args:
        held: Samples of a micro-batch that each rank holds.
        least: Samples of the smallest share.
    """
    shares = cut_shares(batch, speeds, least)
    if slowest(shares, speeds) > (1 - GAIN) * slowest(before["shares"], speeds):
        return keep(before, held)
    return with_micros(shares, held)


def keep(value: Mapping[str, Any], held: Sequence[int]) -> dict[str, Any]:
    """Return the same shares, with more micro-batches if some rank does not hold those that it has."""
    if fit(value, held):
        return {"shares": value["shares"], "micros": value["micros"]}
    return with_micros(value["shares"], held)


def with_micros(shares: Sequence[int], held: Sequence[int]) -> dict[str, Any]:
    """Return shares with the micro-batches that they need."""
    return {"shares": list(shares), "micros": [-(-share // most) for share, most in zip(shares, held, strict=True)]}


def fit(value: Mapping[str, Any], held: Sequence[int]) -> bool:
    """Return whether each rank holds its micro-batches."""
    return all(-(-share // n) <= most for share, n, most in zip(value["shares"], value["micros"], held, strict=True))


def cut_shares(batch: int, speeds: Sequence[float], least: int = 1) -> list[int]:
    """Return the samples of each rank, at least `least`, so that the slowest rank's time is close to the smallest.

    Shares start at the parts of the speeds, rounded down. A sample then goes to, or comes from, the rank that gains
    most, the first of equal ones. The arithmetic is IEEE's, so all ranks get the same from the same speeds.
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
    """Return the seconds of the rank that takes longest."""
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))
