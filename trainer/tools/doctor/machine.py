"""Examines the processor, NUMA nodes, memory, shared memory, and the limits of processes."""

import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

from trainer.process import cgroup
from trainer.process.affinity import numa_nodes, ranges
from trainer.process.cgroup import PROC, SYS
from trainer.tools.doctor.finding import ERROR, NOTE, WARNING, Finding, find, size

MIB, GIB = 1 << 20, 1 << 30
# Below the first number a run with two data workers ends before its first step; below the second it may end later.
FILES = (80, 1024)  # of a rank, and `SOCKETS` to each other rank
SOCKETS = 4  # gloo's, one in each process group
TASKS = (40, 256)  # processes and threads of a rank
SHARED = (MIB, GIB)  # bytes


def examine(
    world: int, local_world: int, proc: Path = PROC, sys: Path = SYS, shared: Path = Path("/dev/shm")
) -> Iterator[Finding]:
    """Yield what this machine has, and what `local_world` of `world` ranks would lack on it."""
    yield Finding("machine", platform.node())
    yield Finding("system", f"Linux {platform.release()} on {platform.machine()}")
    yield from processor(proc, sys)
    yield from memory(proc, sys)
    yield shared_memory(shared)
    yield open_files(world)
    yield processes(local_world, proc, sys)
    yield locked_memory(sys)


def processor(proc: Path, sys: Path) -> Iterator[Finding]:
    usable = frozenset(os.sched_getaffinity(0))
    names = [line.partition(":")[2].strip() for line in read(proc / "cpuinfo").splitlines() if "model name" in line]
    whole = f"{len(usable)} of {os.cpu_count()} cores"
    value = f"{whole}, {names[0]}" if names else whole
    limit = cgroup.cores(proc, sys)
    granted = limit.value if limit and limit.value < len(usable) else float(len(usable))
    yield find(
        granted < 1, "processor",
        value if granted == len(usable) else f"{value}; the control group grants {granted:.3g} of them",
        WARNING, "ranks and data workers share less than a core", "raise the limit of the container (docker --cpus)",
        {"cores": sorted(usable), "granted": granted},
    )  # fmt: skip
    nodes = numa_nodes(sys)
    lists = ", ".join(f"{node} with cores {ranges(cores)}" for node, cores in nodes.items())
    yield find(not nodes, "NUMA nodes", lists or "unknown", NOTE, "ranks are bound to no cores")


def memory(proc: Path, sys: Path) -> Iterator[Finding]:
    found = cgroup.available_memory(proc, sys)
    if found is None:
        yield Finding("memory", "unknown", NOTE, f"{proc / 'meminfo'} can't be read")
        return
    total, free, of = found.total, found.free, " of the control group" if found.limited else ""
    few = free < GIB
    yield find(
        few, "memory", f"{size(free)} free of {size(total)}{of}" if few else f"{size(total)}{of}", WARNING,
        "a rank with data workers takes about 1 GiB, and the kernel kills processes beyond the limit",
        "free memory, or raise the limit of the container", {"free": free, "total": total},
    )  # fmt: skip


def shared_memory(folder: Path) -> Finding:
    """Examine the folder through which data workers pass batches to their rank, and NCCL connects local GPUs."""
    try:
        stat = os.statvfs(folder)
    except OSError as error:
        return Finding(
            str(folder), error.strerror or "missing", ERROR, "data workers can't pass on batches",
            f"mount it: mount -t tmpfs -o size=8g tmpfs {folder}; or give data.workers=0",
        )  # fmt: skip
    if not os.access(folder, os.W_OK):
        why = "data workers can't pass on batches"
        return Finding(str(folder), "not writable", ERROR, why, f"chmod 1777 {folder}")
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    value, data = f"{size(free)} free of {size(total)}", {"free": free, "total": total}
    raise_it = f"enlarge it: mount -o remount,size=8g {folder}, docker --shm-size=8g, or an emptyDir with medium Memory"
    if free < SHARED[0]:
        way_out = f"{raise_it}; or give data.workers=0"
        return Finding(str(folder), value, ERROR, "the locks of data workers fill it", way_out, data)
    if free < SHARED[1]:
        why = "many GPUs, or batches that a recipe keeps, fill it"
        return Finding(str(folder), value, WARNING, why, raise_it, data)
    return Finding(str(folder), size(total), data=data)


def open_files(world: int) -> Finding:
    """Compare the hard limit, to which a run raises its own, with the files and sockets of a rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{in_limit(hard)} (ulimit -Hn); {in_limit(soft)} now" if hard != soft else f"{in_limit(hard)} (ulimit -n)"
    number = float("inf") if hard == resource.RLIM_INFINITY else hard
    least, enough = (files + SOCKETS * world for files in FILES)
    return find(
        number < enough, "open files", value, ERROR if number < least else WARNING,
        f"a rank of {world} needs {least} for files and sockets, and up to {enough} for prefetched batches",
        "raise it in /etc/security/limits.conf, by LimitNOFILE of the service, or docker --ulimit nofile=65536", hard,
    )  # fmt: skip


def processes(local_world: int, proc: Path, sys: Path) -> Finding:
    """Compare the limits of processes and threads, of the user and of the control group, with the ranks' need."""
    own = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limits = {"ulimit -u": float("inf") if own == resource.RLIM_INFINITY or os.geteuid() == 0 else own}
    if limit := cgroup.processes(proc, sys):
        limits[f"pids.max of {limit.group}"] = limit.value
    name, number = min(limits.items(), key=lambda item: item[1])
    unlimited = number == float("inf")
    least, enough = (tasks * local_world for tasks in TASKS)
    return find(
        number < enough, "processes and threads", "no limit" if unlimited else f"{number:.0f} ({name})",
        ERROR if number < least else WARNING, f"{local_world} rank(s) with data workers need {least} to {enough}",
        "raise it: docker --pids-limit, ulimit -u", None if unlimited else number,
    )  # fmt: skip


def locked_memory(sys: Path) -> Finding:
    """Examine the memory that a process may lock, which remote DMA needs."""
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited, cards = most == resource.RLIM_INFINITY, [c.name for c in (sys / "class" / "infiniband").glob("*")]
    return find(
        cards and not unlimited, "locked memory", f"{'unlimited' if unlimited else size(most)} (ulimit -l)", WARNING,
        f"NCCL can't register buffers with {', '.join(cards)}",
        "raise it: ulimit -l unlimited, or docker --ulimit memlock=-1", None if unlimited else most,
    )  # fmt: skip


def in_limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def read(path: Path) -> str:
    """Return a file's text; "" if the system lacks it."""
    try:
        return path.read_text()
    except OSError:
        return ""
