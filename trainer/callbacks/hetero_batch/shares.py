"""Cuts a batch over ranks of unequal speed."""

from collections.abc import Sequence


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
