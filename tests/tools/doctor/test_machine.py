"""Machines of files that the test writes, and limits that it sets: what would end a run is an error, and says why."""

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.tools.doctor import machine
from trainer.tools.doctor.finding import ERROR, NOTE, OK, WARNING, Finding

GIB = 1 << 30


@pytest.fixture
def roots(tmp_path) -> tuple[Path, Path]:
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cgroup.controllers": ""})
    write(tmp_path, {"proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n"})
    write(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: A CPU\n"})
    write(tmp_path, {f"sys/devices/system/node/node{i}/cpulist": f"{i}\n" for i in (0, 1)})
    return tmp_path / "proc", tmp_path / "sys"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def only(findings, subject: str) -> Finding:
    found = [finding for finding in findings if finding.subject == subject]
    assert len(found) == 1
    return found[0]


def test_a_machine_without_limits_is_all_facts(roots):
    found = list(machine.examine(8, 8, *roots))
    assert {finding.level for finding in found if finding.subject in ("processor", "memory", "NUMA nodes")} == {OK}
    assert only(found, "processor").value.endswith(f"of {os.cpu_count()} cores, A CPU")
    assert only(found, "memory").value == "64 GiB" and only(found, "memory").data["free"] == 32 * GIB
    assert only(found, "NUMA nodes").value == "0 with cores 0, 1 with cores 1"


def test_limits_of_a_container(roots, tmp_path):
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "50000 100000", "sys/fs/cgroup/pids.max": "100"})
    write(tmp_path, {"sys/fs/cgroup/memory.max": str(4 * GIB), "sys/fs/cgroup/memory.current": str(4 * GIB - 1000)})
    write(tmp_path, {"sys/fs/cgroup/memory.stat": "inactive_file 488\n"})
    found = list(machine.examine(3, 3, *roots))
    cpu, memory, tasks = (only(found, name) for name in ("processor", "memory", "processes and threads"))
    assert cpu.level == WARNING and "the control group grants 0.5 of them" in cpu.value and "--cpus" in cpu.way_out
    assert memory.level == WARNING and memory.value == "1.453 KiB free of 4 GiB of the control group"
    assert tasks.level == ERROR and tasks.value.startswith("100 (pids.max of ")
    assert tasks.consequence == "3 rank(s) with data workers need 120 to 768"
    write(tmp_path, {"sys/fs/cgroup/pids.max": "200"})
    assert only(machine.examine(3, 3, *roots), "processes and threads").level == WARNING


def test_a_system_that_tells_nothing(tmp_path):
    found = list(machine.examine(1, 1, tmp_path / "proc", tmp_path / "sys"))
    assert only(found, "memory") == Finding("memory", "unknown", NOTE, f"{tmp_path}/proc/meminfo can't be read")
    assert only(found, "NUMA nodes").level == NOTE


@pytest.mark.parametrize(
    ("free", "level"), [(64 << 10, ERROR), (64 << 20, WARNING), (8 * GIB, OK)], ids=["tiny", "of docker", "enough"]
)
def test_shared_memory_by_its_free_bytes(tmp_path, monkeypatch, free, level):
    stat = SimpleNamespace(f_blocks=8 * GIB >> 12, f_bavail=free >> 12, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: stat)
    found = machine.shared_memory(tmp_path)
    assert found.level == level and found.data == {"free": free, "total": 8 * GIB}
    assert ("--shm-size" in found.way_out) == (level != OK)


def test_shared_memory_that_is_not_there(tmp_path):
    found = machine.shared_memory(tmp_path / "shm")
    assert (found.level, found.value) == (ERROR, "No such file or directory") and "data.workers=0" in found.way_out


@pytest.mark.parametrize(
    ("hard", "world", "level"),
    [(64, 2, ERROR), (96, 2, WARNING), (96, 8, ERROR), (4096, 2, OK), (4000, 1000, ERROR),
     (resource.RLIM_INFINITY, 4096, OK)],
)  # fmt: skip
def test_open_files_by_the_hard_limit(monkeypatch, hard, world, level):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, hard))
    found = machine.open_files(world)
    assert found.level == level and found.subject == "open files"
    if level != OK:
        assert str(80 + 4 * world) in found.consequence and "nofile" in found.way_out


def test_the_users_limit_of_processes_holds_for_others_than_root(roots, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (30, 30))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert machine.processes(1, *roots).value == "30 (ulimit -u)"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert machine.processes(1, *roots).value == "no limit"


def test_memory_that_can_not_be_locked_matters_with_remote_dma(roots, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    assert machine.locked_memory(roots[1]).level == OK
    (roots[1] / "class" / "infiniband" / "mlx5_0").mkdir(parents=True)
    found = machine.locked_memory(roots[1])
    assert found.level == WARNING and "mlx5_0" in found.consequence and "memlock" in found.way_out
