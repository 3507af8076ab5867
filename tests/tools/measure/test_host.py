"""Ranks of one host share its cores and memory."""

import os
from typing import Any

import pytest
from support.ranks import run_ranks

from trainer.comm.ranks import Ranks
from trainer.process.environment import Place
from trainer.tools.measure import host


def shared(place: Place) -> tuple[float, float | None]:
    ranks = Ranks(place, "cpu", "gloo", 60)
    found = host.share(ranks)
    ranks.close()
    return found


def test_ranks_share_their_host() -> None:
    cores, memory = host.share(Ranks(Place(), "cpu", "gloo", 60))
    assert cores == len(os.sched_getaffinity(0)) and memory is not None
    for part, own in run_ranks(2, shared):
        assert (part, own) == (cores / 2, pytest.approx(memory / 2))


class Gathered:
    """Stands for two hosts: one has two ranks on cores of their own, the other has one."""

    device = type("CPU", (), {"type": "cpu"})

    def gather(self, own: Any) -> list[Any]:
        return [["a", [0, 1], 8e9, False], ["a", [2, 3], 8e9, False], ["b", [0, 1, 2], 3e9, False]]


def test_the_least_of_all_counts() -> None:
    ranks: Any = Gathered()
    assert host.share(ranks) == (2.0, 3e9)
