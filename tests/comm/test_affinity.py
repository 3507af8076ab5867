"""Ranks that bind themselves: real cores, on a machine whose sockets are a file tree."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.ranks import run_ranks

from trainer.comm import affinity
from trainer.comm.affinity import bind_to_cores, pci_address, ranks_of_node
from trainer.comm.ranks import Ranks
from trainer.log import log
from trainer.process.affinity import bind_process
from trainer.process.environment import Place

CORES = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core")


def two_sockets(root: Path) -> Path:
    """Of the cores here, the first is a socket, and the others are one."""
    for node, cores in enumerate((CORES[:1], CORES[1:])):
        folder = root / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(map(str, cores)))
    return root


def bound(place: Place, mode: str, sys: Path) -> tuple[list[int], int, list[str]]:
    """What a rank has afterwards; the process goes on to serve other tests."""
    messages: list[str] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(log, "info", lambda form, *values: messages.append(form % values))
    before, threads, ranks = (
        frozenset(os.sched_getaffinity(0)),
        torch.get_num_threads(),
        Ranks(place, "cpu", "auto", 60),
    )
    try:
        torch.set_num_threads(16)
        bind_to_cores(ranks, mode, sys)
        return sorted(os.sched_getaffinity(0)), torch.get_num_threads(), messages
    finally:
        ranks.leave()
        bind_process(before)
        torch.set_num_threads(threads)
        patch.undo()


def test_each_rank_gets_a_socket(tmp_path: Path):
    first, second = run_ranks(2, bound, "auto", two_sockets(tmp_path))
    assert first == (CORES[:1], 1, [f"affinity: bound to 1 core(s) of NUMA node 0: {CORES[0]}"])
    assert second[:2] == (CORES[1:], len(CORES) - 1) and "NUMA node 1" in second[2][0]


def test_three_ranks_on_too_few_cores_or_one_node(tmp_path: Path):
    rows = run_ranks(3, bound, "auto", two_sockets(tmp_path))
    assert [cores for cores, _, _ in rows][:2] == [CORES, CORES]  # both would share the first core
    for cores, threads, messages in run_ranks(3, bound, "auto", tmp_path / "nothing"):
        assert (cores, threads) == (CORES, 16)
        assert messages == []  # on CPUs of one NUMA node nothing is lost


def test_none_binds_nothing(tmp_path: Path):
    assert run_ranks(2, bound, "none", two_sockets(tmp_path)) == [(CORES, 16, [])] * 2


def test_one_rank_on_a_cpu_is_left_alone(tmp_path: Path):
    assert bound(Place(), "auto", two_sockets(tmp_path)) == (CORES, 16, [])


def in_a_container(place: Place, sys: Path) -> list[int]:
    """Two nodes of two ranks, whose hosts have one name."""
    return bound(replace(place, local_rank=place.rank % 2, local_world=2), "auto", sys)[0]


def test_containers_with_equal_names_of_hosts_are_apart(tmp_path: Path):
    """Else four ranks would be too many for one core, and nothing were bound."""
    assert run_ranks(4, in_a_container, two_sockets(tmp_path)) == [CORES[:1], CORES[1:]] * 2


def test_which_ranks_are_of_a_node():
    """By names of hosts, if each has as many ranks as its launcher says: srun may number ranks in turns."""
    in_turns = [["a", 0, 2], ["b", 0, 2], ["a", 1, 2], ["b", 1, 2]]
    assert [ranks_of_node(in_turns, rank) for rank in range(4)] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    unlike = [["a", 0, 1], ["a", 0, 3], ["a", 1, 3], ["a", 2, 3]]
    assert [ranks_of_node(unlike, rank) for rank in range(4)] == [[0], [1, 2, 3], [1, 2, 3], [1, 2, 3]]
    both = [["a", *row[1:]] for row in in_turns]
    assert [ranks_of_node(both, rank) for rank in range(4)] == [[], [], [], []]


@pytest.mark.parametrize(("node", "cores"), [("1\n", [frozenset(CORES[1:])]), ("-1\n", [])])
def test_one_rank_on_a_gpu_is_bound_beside_it(
    node: str, cores: list[frozenset[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Nothing is bound if the node is unknown, as in most virtual machines."""
    folder = two_sockets(tmp_path) / "bus" / "pci" / "devices" / "0001:af:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(node)
    gpu = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xAF, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    chosen: list[frozenset[int]] = []
    monkeypatch.setattr(affinity, "bind_process", chosen.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    device = torch.device("cuda", 0)
    assert pci_address(device) == "0001:af:00.0"
    ranks = SimpleNamespace(rank=0, world=1, place=Place(), device=device, gather=lambda row: [row])
    bind_to_cores(ranks, "auto", tmp_path)  # pyright: ignore[reportArgumentType]
    assert chosen == cores
