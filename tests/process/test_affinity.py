"""Cores that ranks get, on machines that are file trees: two sockets with hyper-threading, GPUs on either."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.process.affinity import (
    UNKNOWN,
    Neighbour,
    divide,
    numa_node_of,
    numa_nodes,
    parse_cores,
    physical_cores,
    ranges,
)

SOCKETS = {0: "0-3,8-11", 1: "4-7,12-15"}  # core i has the threads i and i + 8
ALL = list(range(16))


def machine(root: Path, nodes: dict[int, str] = SOCKETS, gpus: dict[str, str] | None = None) -> Path:
    for node, cores in nodes.items():
        folder = root / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    for core in ALL:
        folder = root / "devices" / "system" / "cpu" / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
    for address, node in (gpus or {}).items():
        folder = root / "bus" / "pci" / "devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return root


def cores_of(sys: Path, neighbours: list[Neighbour]) -> list[list[int] | None]:
    parts = [divide(own, neighbours, numa_nodes(sys), sys).cores for own in range(len(neighbours))]
    return [None if part is None else sorted(part) for part in parts]


def reasons(sys: Path, neighbours: list[Neighbour]) -> list[str]:
    return [divide(own, neighbours, numa_nodes(sys), sys).reason for own in range(len(neighbours))]


@pytest.mark.parametrize(
    ("text", "cores"), [("0-2,8\n", [0, 1, 2, 8]), ("5", [5]), ("\n", []), ("0,2-3,7-7", [0, 2, 3, 7])]
)
def test_lists_of_cores(text: str, cores: list[int]):
    assert parse_cores(text) == cores
    assert parse_cores(ranges(cores)) == cores


def test_nodes_without_cores_do_not_count(tmp_path: Path):
    """A node may have memory alone."""
    nodes = numa_nodes(machine(tmp_path, {**SOCKETS, 10: "", 2: "\n"}))
    assert nodes == {0: [0, 1, 2, 3, 8, 9, 10, 11], 1: [4, 5, 6, 7, 12, 13, 14, 15]}
    assert numa_nodes(tmp_path / "nothing") == {}


def test_the_node_of_a_gpu(tmp_path: Path):
    sys = machine(tmp_path, gpus={"0000:3b:00.0": "1", "0000:af:00.0": "-1"})
    assert numa_node_of(sys, "0000:3b:00.0") == 1
    assert numa_node_of(sys, "0000:af:00.0") == UNKNOWN  # the firmware does not tell, as in most virtual machines
    assert numa_node_of(sys, "0000:d8:00.0") == UNKNOWN


def test_threads_of_a_core_stay_together(tmp_path: Path):
    assert physical_cores(machine(tmp_path), [9, 0, 8, 1, 12]) == [[0, 8], [1, 9], [12]]
    assert physical_cores(tmp_path / "nothing", [3, 1]) == [[1], [3]]


def test_ranks_get_cores_beside_their_gpus(tmp_path: Path):
    """The first two GPUs are on the second socket."""
    neighbours = [Neighbour(ALL, near) for near in (1, 1, 0, 0)]
    assert cores_of(machine(tmp_path), neighbours) == [[4, 5, 12, 13], [6, 7, 14, 15], [0, 1, 8, 9], [2, 3, 10, 11]]
    assert reasons(tmp_path, neighbours)[1] == "bound to 4 core(s) of NUMA node 1: 6-7,14-15"


def test_gpus_of_one_socket_share_its_cores(tmp_path: Path):
    """The other socket's are far away, even if no rank uses them."""
    parts = cores_of(machine(tmp_path), [Neighbour(ALL, 0)] * 3)
    assert parts == [[0, 8], [1, 9], [2, 3, 10, 11]]


def test_without_gpus_ranks_are_spread_over_the_nodes(tmp_path: Path):
    sys = machine(tmp_path)
    assert cores_of(sys, [Neighbour(ALL, None)] * 2) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert cores_of(sys, [Neighbour(ALL, 7)] * 2) == cores_of(sys, [Neighbour(ALL, None)] * 2)  # no such node


@pytest.mark.parametrize("world", range(1, 9))
def test_no_core_is_of_two_ranks_and_each_rank_has_some(world: int, tmp_path: Path):
    parts = cores_of(machine(tmp_path), [Neighbour(ALL, None)] * world)
    flat = [core for part in parts if part is not None for core in part]
    assert len(parts) == world and all(parts) and len(flat) == len(set(flat))
    assert world == 1 or sorted(flat) == ALL


def test_cores_that_a_batch_system_granted_are_kept_to(tmp_path: Path):
    granted = [1, 2, 3, 4, 5, 9]
    assert cores_of(machine(tmp_path), [Neighbour(granted, 0), Neighbour(granted, 1)]) == [[1, 2, 3, 9], [4, 5]]


def test_ranks_that_a_launcher_has_bound_are_left_alone(tmp_path: Path):
    neighbours = [Neighbour([0, 1], 1), Neighbour([2, 3, 4], 1)]
    assert cores_of(machine(tmp_path), neighbours) == [None, None]
    assert reasons(tmp_path, neighbours)[1] == "the launcher has given each rank its own cores: 3 for this one"


@pytest.mark.parametrize(
    ("nodes", "neighbours", "reason"),
    [
        ({0: "0-15"}, [Neighbour(ALL, 0)] * 2, "the cores are of one NUMA node, so nothing is bound"),
        (SOCKETS, [Neighbour([0, 1, 8], 1)] * 2, "the cores are of one NUMA node, so nothing is bound"),
        ({}, [Neighbour(ALL, None)] * 2, "the cores are of one NUMA node, so nothing is bound"),
        (
            SOCKETS,
            [Neighbour([0, 1, 4], None), Neighbour([1, 4, 5], None)],
            "ranks may use different cores, some of them the same, so nothing is bound",
        ),
        (SOCKETS, [Neighbour(ALL, UNKNOWN)] * 2, "the NUMA node of a GPU is unknown, so nothing is bound"),
        (
            SOCKETS,
            [Neighbour(ALL, 1), Neighbour(ALL, UNKNOWN)],
            "the NUMA node of a GPU is unknown, so nothing is bound",
        ),
        (SOCKETS, [Neighbour([0, 8, 4], 0)] * 2, "NUMA node 0 has 1 core(s) for 2 ranks, so none of them is bound"),
    ],
)
def test_nothing_is_bound(nodes: dict[int, str], neighbours: list[Neighbour], reason: str, tmp_path: Path):
    sys = machine(tmp_path, nodes)
    assert cores_of(sys, neighbours) == [None] * 2 and reasons(sys, neighbours) == [reason] * 2


CODE = """
import os, sys, threading
from trainer.process.affinity import bind_process
go, seen = threading.Event(), []
thread = threading.Thread(target=lambda: (go.wait(), seen.append(os.sched_getaffinity(0))))
thread.start()
core = frozenset([max(os.sched_getaffinity(0))])
bind_process(core)
go.set()
thread.join()
child = os.fork()
if not child:
    os._exit(0 if os.sched_getaffinity(0) == core else 1)
seen += [os.sched_getaffinity(0), core if os.waitpid(child, 0)[1] == 0 else None]
assert seen == [core] * 3, seen
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_threads_that_run_and_processes_to_come_are_bound():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
