"""Ranks of one host share its cores and memory."""

import os
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks

from trainer.comm.ranks import Ranks
from trainer.process.cgroup import Limit
from trainer.process.environment import Place
from trainer.tools.measure import host


def shared(place: Place) -> tuple[float, float | None]:
    ranks = Ranks(place, "cpu", "gloo", 60)
    found = host.share(ranks)
    ranks.close()
    return found


def test_ranks_share_their_host() -> None:
    cores, memory = host.share(Ranks(Place(), "cpu", "gloo", 60))
    assert 0 < cores <= len(os.sched_getaffinity(0)) and memory is not None
    for part, own in run_ranks(2, shared):
        assert (part, own) == (cores / 2, pytest.approx(memory / 2))


class Gathered:
    """Stands for ranks of two hosts: three on one, one on the other."""

    device = type("CPU", (), {"type": "cpu"})

    def __init__(self, **limits: Any) -> None:
        a = {"host": "a", "gpu": 0, "memory": 9e9, "core_limit": None, "memory_limit": None, **limits}
        b = {**a, "host": "b", "affinity": [0, 1, 2, 3], "memory": 4e9, "core_limit": None, "memory_limit": None}
        self.places = [{**a, "affinity": [0, 1, 2, 3]}, {**a, "affinity": [0, 1, 2, 3]}, {**a, "affinity": [4, 5]}, b]

    def gather(self, own: Any) -> list[Any]:
        assert own.keys() == self.places[0].keys()
        return self.places


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ({}, (2.0, 3e9)),
        ({"core_limit": (3.0, 77)}, (1.0, 3e9)),
        ({"core_limit": (12.0, 77), "memory_limit": (6e9, 78)}, (2.0, 2e9)),
        ({"gpu": 1e9}, (2.0, 1e9)),
    ],
)
def test_the_least_of_all_counts(limits: dict[str, Any], found: tuple[float, float]) -> None:
    ranks: Any = Gathered(**limits)
    assert host.share(ranks) == found


def test_containers_have_limits_of_their_own() -> None:
    """Ranks 0 and 1 are in one control group, rank 2 in another one."""
    ranks: Any = Gathered(core_limit=(1.0, 77))
    ranks.places[2]["core_limit"] = (0.75, 78)
    assert host.share(ranks)[0] == 0.5
    ranks.places[2]["core_limit"] = (0.25, 78)
    assert host.share(ranks)[0] == 0.25


def test_a_limit_is_known_by_its_group(tmp_path: Path) -> None:
    assert host.limit(None) is None
    assert host.limit(Limit(2.0, tmp_path)) == (2.0, tmp_path.stat().st_ino)
