"""Limits of control groups of both versions, nested, and in a container; and the kernel's own."""

from pathlib import Path

import pytest

from trainer.process import cgroup


@pytest.fixture
def roots(tmp_path) -> tuple[Path, Path]:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "sys" / "fs" / "cgroup").mkdir(parents=True)
    return tmp_path / "proc", tmp_path / "sys"


def write(sys: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = sys / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def test_the_tightest_limit_on_the_way_up_holds(roots):
    proc, sys = roots
    (proc / "self" / "cgroup").write_text("0::/job/step\n")
    write(sys, {"cgroup.controllers": "cpu memory pids", "job/memory.max": 1000, "job/step/memory.max": 2000})
    write(sys, {"job/cpu.max": "max 100000", "job/step/cpu.max": "150000 100000", "job/step/pids.max": "max"})
    assert cgroup.memory(proc, sys) == (1000, sys / "fs" / "cgroup" / "job")
    assert cgroup.cores(proc, sys) == (1.5, sys / "fs" / "cgroup" / "job" / "step")
    assert cgroup.processes(proc, sys) is None


def test_ranks_share_the_limit_of_their_container(roots):
    proc, sys = roots
    assert cgroup.cores_each(2, proc, sys) == float("inf")
    (proc / "self" / "cgroup").write_text("0::/\n")
    write(sys, {"cgroup.controllers": "cpu", "cpu.max": "600000 100000"})
    assert cgroup.cores_each(1, proc, sys) == 6 and cgroup.cores_each(4, proc, sys) == 1.5


def test_version_1_has_a_folder_for_each_controller(roots):
    proc, sys = roots
    (proc / "self" / "cgroup").write_text("5:memory:/a\n4:pids:/\n3:cpu,cpuacct:/a\n1:name=systemd:/\n0::/\n")
    write(sys, {"memory/memory.limit_in_bytes": 9223372036854771712, "memory/a/memory.limit_in_bytes": 5000})
    write(sys, {"memory/a/memory.usage_in_bytes": 900, "memory/a/memory.stat": "cache 7\ntotal_inactive_file 300"})
    write(sys, {"cpu/a/cpu.cfs_quota_us": 50000, "cpu/a/cpu.cfs_period_us": 100000, "cpu/cpu.cfs_quota_us": -1})
    write(sys, {"cpuacct/a/cpuacct.usage": 2_500_000_000, "pids/pids.max": 77})
    limit = cgroup.memory(proc, sys)
    assert limit == (5000, sys / "fs" / "cgroup" / "memory" / "a") and cgroup.memory_used(limit.group) == 600
    cores = cgroup.cores(proc, sys)
    assert cores and cores.value == 0.5 and cgroup.cpu_seconds(cores.group, proc, sys) == 2.5
    assert cgroup.processes(proc, sys) == (77, sys / "fs" / "cgroup" / "pids")


def test_a_container_sees_its_group_as_the_root(roots):
    """Its path is the host's, and leads nowhere."""
    proc, sys = roots
    (proc / "self" / "cgroup").write_text("5:memory:/docker/4f2c\n")
    write(sys, {"memory/memory.limit_in_bytes": 4096})
    assert cgroup.memory(proc, sys) == (4096, sys / "fs" / "cgroup" / "memory")


def test_without_control_groups_there_is_no_limit(roots):
    assert [call(*roots) for call in (cgroup.memory, cgroup.cores, cgroup.processes)] == [None, None, None]
    (roots[0] / "self" / "cgroup").write_text("0::/\n")
    write(roots[1], {"cgroup.controllers": "", "memory.max": "strange"})
    assert cgroup.memory(*roots) is None


def test_what_the_kernel_has_can_be_read():
    for limit in (cgroup.memory(), cgroup.cores(), cgroup.processes()):
        assert limit is None or (limit.value > 0 and limit.group.is_dir())


def test_kills_for_want_of_memory_are_counted_in_each_version(roots):
    proc, sys = roots
    assert cgroup.oom_kills(proc, sys) == 0
    (proc / "vmstat").write_text("pgfault 9\noom_kill 2\n")
    assert cgroup.oom_kills(proc, sys) == 2
    (proc / "self" / "cgroup").write_text("0::/job\n")
    write(sys, {"cgroup.controllers": "memory", "job/memory.events": "oom 4\noom_kill 3\noom_group_kill 0\n"})
    assert cgroup.oom_kills(proc, sys) == 5
