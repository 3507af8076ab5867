"""Examines GPUs: those on the PCI bus, those that the driver shows, and those that torch can use."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer import timeouts
from trainer.monitors.gpu_monitor import nvml
from trainer.process.affinity import numa_node_of
from trainer.process.cgroup import SYS
from trainer.tools.doctor.finding import ERROR, NOTE, OK, WARNING, Finding, in_time, share_by_speed, size
from trainer.tools.doctor.links import LEGEND, matrix, table
from trainer.tools.doctor.machine import read

NVIDIA, DISPLAYS = "0x10de", ("0x0300", "0x0302")  # PCI's vendor, and its classes of display controllers
OTHERS = 0.1  # share of a GPU's memory that others may hold without a warning
MOST_LINKS = 36
WIDTHS = ("nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetMaxPcieLinkWidth")


@dataclass
class Shown:
    """A GPU as the driver reports it."""

    address: str  # on the PCI bus
    finding: Finding
    kind: str = ""  # what its speed and its room depend on
    peers: Counter[str] = field(default_factory=Counter)  # PCI address there -> NVLinks


def examine(sys: Path = SYS) -> Iterator[Finding]:
    """Yield the driver, each GPU, the matrix of links, and what keeps torch from using them."""
    late = Finding(
        "GPUs", f"no answer within {timeouts.GPUS_S:g} s", ERROR, "a run would wait for them, too",
        "see whether nvidia-smi answers, and the kernel's log for Xid; restart the machine",
    )  # fmt: skip
    yield from in_time(timeouts.GPUS_S, late, examine_gpus(sys))


def examine_gpus(sys: Path) -> Iterator[Finding]:
    there = on_the_bus(sys)
    try:
        with nvml.opened() as library:
            cuda = library.nvmlSystemGetCudaDriverVersion_v2()
            version = library.nvmlSystemGetDriverVersion()
            yield Finding("NVIDIA driver", f"{version}, up to CUDA {cuda // 1000}.{cuda % 1000 // 10}")
            shown = list(devices(library, sys))
    except RuntimeError as error:
        reason = f"the driver can't be asked: {error}"
        if there:
            yield Finding("GPUs", f"{len(there)} of NVIDIA on the PCI bus ({', '.join(there)})", WARNING, reason)
        else:
            yield Finding("GPUs", "none to be seen", NOTE, reason)
        shown = []
    else:
        if not shown:
            yield Finding("GPUs", "the driver shows none", WARNING, "training runs on the CPU", "see `nvidia-smi -L`")
    yield from (gpu.finding for gpu in shown)
    yield from kinds(shown)
    yield from links(sys, shown)
    yield from of_torch(len(shown))


def on_the_bus(sys: Path) -> list[str]:
    """Return the PCI addresses of NVIDIA's display controllers, with or without a driver."""
    folders = sorted((sys / "bus" / "pci" / "devices").glob("*"))
    own = [path for path in folders if read(path / "vendor").strip() == NVIDIA]
    return [path.name for path in own if read(path / "class").startswith(DISPLAYS)]


def devices(library: ModuleType, sys: Path) -> Iterator[Shown]:
    for index in range(library.nvmlDeviceGetCount()):
        subject = f"GPU {index}"
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            address = short(library.nvmlDeviceGetPciInfo(handle).busId)
            name, memory = library.nvmlDeviceGetName(handle), memory_of(library, handle)
        except library.NVMLError as error:
            yield Shown("", Finding(
                subject, f"NVML: {error}", ERROR, "a rank on it can't start",
                "see the kernel's log for Xid; leave it out by CUDA_VISIBLE_DEVICES",
            ))  # fmt: skip
            continue
        model = f"{name}, {size(memory.total)}" if memory else name
        value = f"{model}, PCI {address}, NUMA node {numa_node_of(sys, address)}"
        width, full = (asked(library, function, handle) for function in WIDTHS)
        value += f", PCIe x{width}" if width else ""
        mig = ", MIG" if (asked(library, "nvmlDeviceGetMigMode", handle) or [0])[0] else ""
        value += mig
        bits = asked(library, "nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        slow = [reason for bit, reason in nvml.SLOWDOWNS.items() if bits & bit]
        level, consequence, way_out = OK, "", ""
        if slow:
            level, consequence = WARNING, f"its clocks are held down by {', '.join(slow)}, and all ranks wait for it"
            way_out = "see its cooling and power by nvidia-smi -q -d PERFORMANCE"
        elif width and full and width < full:
            level, consequence = WARNING, f"it could have PCIe x{full}, so copies are slower"
            way_out = "see its slot and riser by nvidia-smi -q -d PCIE"
        elif memory is None:
            level, consequence = NOTE, "the driver does not report its memory, so what others use is unknown"
        elif memory.used > OTHERS * memory.total:
            level, consequence = WARNING, f"others hold {size(memory.used)} of it"
            way_out = "see their processes by nvidia-smi, and end them"
        data = {"name": name, "address": address}
        data |= {"memory": memory.total, "used": memory.used} if memory else {}
        finding = Finding(subject, value, level, consequence, way_out, data)
        kind = model
        power = asked(library, "nvmlDeviceGetEnforcedPowerLimit", handle)
        kind += f", {power / 1000:.0f} W" if power else ""
        kind += f", PCIe x{width} of x{full}" if width and full and width < full else ""
        yield Shown(address, finding, kind + mig, nvlinks(library, handle))


def memory_of(library: ModuleType, handle: Any) -> Any:
    """Return the GPU's memory; None if the driver does not report it, as under MIG, or on GB10."""
    try:
        return library.nvmlDeviceGetMemoryInfo(handle)
    except library.NVMLError_GpuIsLost:
        raise
    except library.NVMLError:
        return None


def kinds(shown: list[Shown]) -> Iterator[Finding]:
    """Yield the kinds of this machine's GPUs, which the report compares over ranks."""
    counts = Counter(sorted(gpu.kind for gpu in shown if gpu.kind))
    if len(counts) == 1:
        yield Finding("kind of GPU", *counts)
    elif counts:
        value = " + ".join(f"{count} x {kind}" for kind, count in counts.items())
        yield Finding("kind of GPU", value, NOTE, "the slowest rank sets the pace", share_by_speed())


def nvlinks(library: ModuleType, handle: Any) -> Counter[str]:
    """Return the active links of a GPU by the PCI address of the GPU or NVSwitch at the other end."""
    found = Counter[str]()
    for link in range(MOST_LINKS):
        try:
            if library.nvmlDeviceGetNvLinkState(handle, link):
                found[short(library.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)] += 1
        except library.NVMLError:  # no such link, or no NVLink at all
            break
    return found


def asked(library: ModuleType, function: str, handle: Any) -> Any:
    """Return the driver's answer; None if it refuses the query."""
    try:
        return getattr(library, function)(handle)
    except library.NVMLError:
        return None


def short(address: str | bytes) -> str:
    """Return a PCI address as in /sys: "00000000:3B:00.0" -> "0000:3b:00.0"."""
    text = address.decode() if isinstance(address, bytes) else address
    return text[-12:].lower()


def between(shown: list[Shown]) -> dict[tuple[str, str], int]:
    """Return the NVLinks between each pair of GPUs: direct ones, and those that both have to switches."""
    addresses = {gpu.address for gpu in shown}
    switched = {g.address: sum(n for there, n in g.peers.items() if there not in addresses) for g in shown}
    return {
        (one.address, other.address): one.peers[other.address] + min(switched[one.address], switched[other.address])
        for one in shown
        for other in shown
        if one is not other
    }


def links(sys: Path, shown: list[Shown]) -> Iterator[Finding]:
    """Yield the matrix of GPUs and network cards, a line for each GPU."""
    gpus = {gpu.finding.subject.replace(" ", ""): gpu.address for gpu in shown if gpu.address}
    cards = {
        folder.name: (folder / "device").resolve().name
        for kind in ("net", "infiniband")
        for folder in sorted((sys / "class" / kind).glob("*"))
        if (folder / "device").exists()
    }
    if gpus and len(gpus) + len(cards) > 1:
        words = matrix(sys, gpus | cards, between([gpu for gpu in shown if gpu.address]), list(gpus))
        head, *rows = table(words)
        yield Finding("links", f"{head}   ({LEGEND})", data=words)
        yield from (Finding("links", row) for row in rows)


def of_torch(shown: int) -> Iterator[Finding]:
    """Yield what torch makes of the GPUs. `libraries` reports a torch that can't be imported."""
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except Exception:
        return
    if not count:
        if shown:
            built = "is a CPU build" if torch.version.cuda is None else f"needs a driver for CUDA {torch.version.cuda}"
            yield Finding(
                "GPUs of torch", "none", WARNING, f"training runs on the CPU, since torch {torch.__version__} {built}",
                "install a CUDA build of torch that the driver can run",
            )  # fmt: skip
        return
    kernels = torch.cuda.get_arch_list()
    for index in range(count):
        major, minor = torch.cuda.get_device_capability(index)
        known = any(kernel.startswith((f"sm_{major}", f"compute_{major}")) for kernel in kernels)
        yield Finding(
            f"GPU {index} of torch", f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}",
            OK if known else ERROR, "" if known else f"torch has kernels for {', '.join(kernels)} alone",
            "" if known else "install a torch that has kernels for it",
        )  # fmt: skip
    yield Finding("NCCL between GPUs", "not tried", NOTE, "", "echelon bench measures its collectives")
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    barred = [f"{i} to {j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    if pairs:
        yield Finding(
            "peer access", f"not from GPU {', '.join(barred)}" if barred else "between all GPUs",
            WARNING if barred else OK, "their copies go through host memory" if barred else "",
            "see IOMMU and ACS in NCCL's troubleshooting page" if barred else "",
        )  # fmt: skip
