"""The host's numbers by hand, from files that the test writes, and from this machine."""

from pathlib import Path

import pytest

from trainer.monitors.gpu_monitor import host
from trainer.monitors.gpu_monitor.host import watch_host


@pytest.fixture
def clock(monkeypatch):
    now = [50.0]
    monkeypatch.setattr(host.time, "monotonic", lambda: now[0])
    return now


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine(root: Path, ticks: int = 0, sectors: int = 0, received: int = 0) -> tuple[Path, Path]:
    """4 cores of which `ticks` ran; a disk with a partition and a loop; a card, a bridge over it, the loopback."""
    row = "0 0 0 0 0 0 0 0 0"
    net = f" eth0: {received} 1 0 0 0 0 0 0 {2 * received} {row}\nbr0: {received} 1 0 0 0 0 0 0 {received} {row}\n"
    disks = f"259 0 nvme0n1 9 0 {sectors} 0 5 0 {3 * sectors} 0\n259 1 nvme0n1p1 9 0 {sectors} 0 5 0 {sectors} 0\n"
    write(
        root,
        {
            "proc/stat": f"cpu  {ticks} 10 20 {1000 - ticks} 30 0 0 0 0 0\ncpu0 1 1 1 1\n",
            "proc/meminfo": "MemTotal: 8388608 kB\nMemFree: 100 kB\nMemAvailable: 6291456 kB\nHugePages_Total: 0\n",
            "proc/diskstats": f"{disks}7 0 loop0 1 0 {sectors} 0 0 0 {sectors} 0\n",
            "proc/net/dev": f"Inter-| Receive\n face |bytes\n    lo: 999999999 1 0 0 0 0 0 0 999999999 {row}\n{net}",
            "sys/block/nvme0n1/device/model": "", "sys/block/loop0/size": "", "sys/class/net/eth0/device/vendor": "",
        },
    )  # fmt: skip
    return root / "proc", root / "sys"


def test_a_machine(tmp_path, clock, messages):
    source = watch_host(*machine(tmp_path))
    assert next(source) == {"host/ram_gib": 2.0}
    clock[0] += 4.0
    machine(tmp_path, ticks=250, sectors=8192, received=8 << 20)
    write(tmp_path, {"proc/stat": "cpu  250 10 20 1750 30 0 0 0 0 0\n"})
    assert next(source) == {
        "host/ram_gib": 2.0, "host/cpu": 0.25, "host/disk_read_mib_s": 1.0, "host/disk_write_mib_s": 3.0,
        "host/network_rx_mib_s": 2.0, "host/network_tx_mib_s": 4.0,
    }  # fmt: skip
    assert messages == []


def test_remote_dma_is_counted_by_its_ports(tmp_path, clock):
    """/proc/net/dev does not see it."""
    counters = "sys/class/infiniband/mlx5_0/ports/1/counters"
    paths = machine(tmp_path)
    write(tmp_path, {f"{counters}/port_rcv_data": "0", f"{counters}/port_xmit_data": "0"})
    source = watch_host(*paths)
    next(source)
    clock[0] += 2.0
    write(tmp_path, {f"{counters}/port_rcv_data": str(1 << 20), f"{counters}/port_xmit_data": str(3 << 20)})  # words
    sample = next(source)
    assert (sample["host/network_rx_mib_s"], sample["host/network_tx_mib_s"]) == (2.0, 6.0)


def test_a_container_with_limits_has_its_own_cpu_and_memory(tmp_path, clock):
    group = "sys/fs/cgroup/pod"
    write(tmp_path, {"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/cgroup.controllers": "cpu memory"})
    write(tmp_path, {f"{group}/cpu.max": "200000 100000", f"{group}/cpu.stat": "usage_usec 1000000\nuser_usec 1\n"})
    write(tmp_path, {f"{group}/memory.max": str(4 << 30), f"{group}/memory.current": str(3 << 30)})
    write(tmp_path, {f"{group}/memory.stat": f"anon 5\ninactive_file {1 << 30}\n"})
    source = watch_host(*machine(tmp_path))
    assert next(source)["host/ram_gib"] == 2.0
    clock[0] += 3.0
    write(tmp_path, {f"{group}/cpu.stat": "usage_usec 4000000\nuser_usec 1\n"})
    assert next(source)["host/cpu"] == 0.5  # 3 s of the 2 cores' 6


def test_files_that_are_missing_or_strange_cost_their_number_and_one_line(tmp_path, clock, messages):
    paths = machine(tmp_path)
    (tmp_path / "proc" / "diskstats").unlink()
    write(tmp_path, {"proc/meminfo": "nothing\n"})
    source = watch_host(*paths)
    next(source)
    clock[0] += 1.0
    write(tmp_path, {"proc/stat": "cpu  1 10 20 1999 30 0 0 0 0 0\n"})
    names = {"host/cpu", "host/network_rx_mib_s", "host/network_tx_mib_s"}
    assert next(source).keys() == names and next(source).keys() <= names
    assert [message.partition(":")[2].split(":")[0] for message in messages] == [
        " no host/ram_gib", " no host/disk_read_mib_s, host/disk_write_mib_s"
    ]  # fmt: skip
    assert messages[1].endswith("diskstats: No such file or directory")


def test_this_machine():
    source = watch_host()
    assert next(source)["host/ram_gib"] > 0.01
    busy = sum(i * i for i in range(300_000))
    assert busy and 0 <= next(source).get("host/cpu", 0.5) <= 1.01
