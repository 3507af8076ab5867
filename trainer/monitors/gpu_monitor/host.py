"""Measures the host: CPU, memory, disks and network. In a container with limits, CPU and memory are the container's."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from trainer.log import log
from trainer.process import cgroup
from trainer.process.cgroup import PROC, SYS

MIB, GIB = 1 << 20, 1 << 30
SECTOR = 512  # bytes, in /proc/diskstats, whatever the disk has
WORD = 4  # bytes, in the counters of InfiniBand


Reader = Callable[[], tuple[float, ...]]


def watch_host(proc: Path = PROC, sys: Path = SYS) -> Iterator[dict[str, float]]:
    """Yield means since the last sample, endlessly. A number that can't be read is dropped with one log line."""
    levels: dict[str, Reader] = {"host/ram_gib": partial(memory, proc, sys)}
    counters: dict[str, Reader] = {
        "host/cpu": partial(cpu, proc, sys),
        "host/disk_read_mib_s, host/disk_write_mib_s": partial(disk, proc, sys),
        "host/network_rx_mib_s, host/network_tx_mib_s": partial(network, proc, sys),
    }
    before = dict[str, tuple[float, ...]]()
    while True:
        sample = {name: value for name, (value,) in read(levels).items()}
        now = read(counters)
        for names, (*values, clock) in now.items():
            *old, then = before.get(names, (*values, clock))
            if clock > then:
                rates = ((value - was) / (clock - then) for value, was in zip(values, old, strict=True))
                sample |= zip(names.split(", "), rates, strict=True)
        before = now
        yield sample


def read(readers: dict[str, Reader]) -> dict[str, tuple[float, ...]]:
    """Return what each reader returns. A reader that fails is logged and removed."""
    found = dict[str, tuple[float, ...]]()
    for names, reader in list(readers.items()):
        try:
            found[names] = reader()
        except (OSError, ValueError, LookupError) as error:
            del readers[names]
            of_system = isinstance(error, OSError)
            reason = f"{error.filename}: {error.strerror}" if of_system else f"unknown format ({error!r})"
            log.warning("gpu_monitor: no %s: %s", names, reason)
    return found


def cpu(proc: Path, sys: Path) -> tuple[float, float]:
    """Return the busy seconds of all cores so far, and the seconds available."""
    if limit := cgroup.cores(proc, sys):
        return cgroup.cpu_seconds(limit.group, proc, sys), limit.value * time.monotonic()
    user, nice, system, idle, iowait, *rest = map(int, (proc / "stat").read_text().split("\n", 1)[0].split()[1:9])
    busy = user + nice + system + sum(rest)
    return busy, busy + idle + iowait


def memory(proc: Path, sys: Path) -> tuple[float]:
    """Return the GiB in use, without the kernel's page cache."""
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    size = {line[0].rstrip(":"): int(line[1]) << 10 for line in lines}
    limit = cgroup.memory(proc, sys)
    if limit and limit.value < size["MemTotal"]:
        return (cgroup.memory_used(limit.group) / GIB,)
    return ((size["MemTotal"] - size["MemAvailable"]) / GIB,)


def disk(proc: Path, sys: Path) -> tuple[float, float, float]:
    """Return the MiB read and written by physical disks, and the time. Network file systems are not counted."""
    rows = [line.split() for line in (proc / "diskstats").read_text().splitlines()]
    real = [row for row in rows if (sys / "block" / row[2] / "device").exists()]  # no loops, partitions or volumes
    scale = SECTOR / MIB
    return sum(int(row[5]) for row in real) * scale, sum(int(row[9]) for row in real) * scale, time.monotonic()


def network(proc: Path, sys: Path) -> tuple[float, float, float]:
    """Return the MiB received and sent, and the time. Remote DMA, as NCCL's, is counted by its ports.

    Physical interfaces count. A container may have none; then all but the loopback count.
    """
    rows = [line.replace(":", " ").split() for line in (proc / "net" / "dev").read_text().splitlines()[2:]]
    rows = [row for row in rows if row[0] != "lo"]
    real = [row for row in rows if (sys / "class" / "net" / row[0] / "device").exists()] or rows
    received, sent = sum(int(row[1]) for row in real), sum(int(row[9]) for row in real)
    for counters in (sys / "class" / "infiniband").glob("*/ports/*/counters"):
        received += WORD * int((counters / "port_rcv_data").read_text())
        sent += WORD * int((counters / "port_xmit_data").read_text())
    return received / MIB, sent / MIB, time.monotonic()
