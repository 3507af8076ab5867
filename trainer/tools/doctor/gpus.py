"""Examines GPUs: those on the PCI bus, those that the driver shows, and those that torch can use."""

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer import timeouts
from trainer.errors import printable
from trainer.monitors.gpu_monitor import nvml
from trainer.process.affinity import numa_node_of
from trainer.process.cgroup import SYS
from trainer.tools.doctor.finding import ERROR, NOTE, OK, WARNING, Finding, find, in_time, share_by_speed, size
from trainer.tools.doctor.machine import read

NVIDIA, DISPLAYS = "0x10de", ("0x0300", "0x0302")  # PCI's vendor, and its classes of display controllers
OTHERS = 0.1  # share of a GPU's memory that others may use without a warning
WIDTHS = ("nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetMaxPcieLinkWidth")


def examine(sys: Path = SYS, first: bool = True) -> Iterator[Finding]:
    """Yield the driver, each GPU, what keeps torch from using it, and on a machine's first rank the links."""
    late = Finding(
        "GPUs", f"no answer within {timeouts.GPUS_S:g} s", ERROR, "a run would wait for them, too",
        "see whether nvidia-smi answers, and the kernel's log for Xid; restart the machine",
    )  # fmt: skip
    found = list(in_time(timeouts.GPUS_S, late, examine_gpus(sys)))
    yield from found
    if first and any(finding.subject == "NVIDIA driver" for finding in found):
        yield from links()


def examine_gpus(sys: Path) -> Iterator[Finding]:
    there, shown = on_the_bus(sys), list[tuple[Finding, str]]()
    try:
        with nvml.opened() as library:
            cuda = library.nvmlSystemGetCudaDriverVersion_v2()
            version = library.nvmlSystemGetDriverVersion()
            yield Finding("NVIDIA driver", f"{version}, up to CUDA {cuda // 1000}.{cuda % 1000 // 10}")
            shown = list(devices(library, sys))
        if not shown:
            yield Finding("GPUs", "the driver shows none", WARNING, "training runs on the CPU", "see `nvidia-smi -L`")
    except RuntimeError as error:
        reason = f"the driver can't be queried: {error}"
        if there:
            yield Finding("GPUs", f"{len(there)} of NVIDIA on the PCI bus ({', '.join(there)})", WARNING, reason)
        else:
            yield Finding("GPUs", "none found", NOTE, reason)
    yield from (finding for finding, _ in shown)
    yield from kinds(kind for _, kind in shown if kind)
    yield from of_torch(len(shown))


def on_the_bus(sys: Path) -> list[str]:
    """Return the PCI addresses of NVIDIA's display controllers, with or without a driver."""
    folders = sorted((sys / "bus" / "pci" / "devices").glob("*"))
    own = [path for path in folders if read(path / "vendor").strip() == NVIDIA]
    return [path.name for path in own if read(path / "class").startswith(DISPLAYS)]


def devices(library: ModuleType, sys: Path) -> Iterator[tuple[Finding, str]]:
    """Yield each GPU's finding, and its kind: what its speed and memory depend on, or "" if it is lost."""
    for index in range(library.nvmlDeviceGetCount()):
        subject = f"GPU {index}"
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            address = library.nvmlDeviceGetPciInfo(handle).busId
            name, memory = library.nvmlDeviceGetName(handle), memory_of(library, handle)
        except library.NVMLError as error:
            yield Finding(
                subject, f"NVML: {error}", ERROR, "a rank on it can't start",
                "see the kernel's log for Xid; leave it out by CUDA_VISIBLE_DEVICES",
            ), ""  # fmt: skip
            continue
        address = (address.decode() if isinstance(address, bytes) else address)[-12:].lower()  # as in /sys
        width, full = (asked(library, function, handle) for function in WIDTHS)
        bits = asked(library, "nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        slow = [reason for bit, reason in nvml.SLOWDOWNS.items() if bits & bit]
        narrow, problem = bool(width and full and width < full), (OK, "", "")
        if slow:
            why = f"its clocks are throttled by {', '.join(slow)}, and all ranks wait for it"
            problem = WARNING, why, "see its cooling and power by nvidia-smi -q -d PERFORMANCE"
        elif narrow:
            why = f"it could have PCIe x{full}, so copies are slower"
            problem = WARNING, why, "see its slot and riser by nvidia-smi -q -d PCIE"
        elif memory is None:
            problem = NOTE, "the driver does not report its memory, so what others use is unknown", ""
        elif memory.used > OTHERS * memory.total:
            problem = (
                WARNING,
                f"others use {size(memory.used)} of it",
                "see their processes by nvidia-smi, and end them",
            )
        mig = ", MIG" if (asked(library, "nvmlDeviceGetMigMode", handle) or [0])[0] else ""
        model = f"{name}, {size(memory.total)}" if memory else name
        lanes = f", PCIe x{width}" if width else ""
        value = f"{model}, PCI {address}, NUMA node {numa_node_of(sys, address)}{lanes}{mig}"
        data = {"name": name, "address": address}
        data |= {"memory": memory.total, "used": memory.used} if memory else {}
        power = asked(library, "nvmlDeviceGetEnforcedPowerLimit", handle)
        watts = f", {power / 1000:.0f} W" if power else ""
        yield Finding(subject, value, *problem, data), f"{model}{watts}{f'{lanes} of x{full}' if narrow else ''}{mig}"


def memory_of(library: ModuleType, handle: Any) -> Any:
    """Return the GPU's memory; None if the driver does not report it, as under MIG, or on GB10."""
    try:
        return library.nvmlDeviceGetMemoryInfo(handle)
    except library.NVMLError_GpuIsLost:
        raise
    except library.NVMLError:
        return None


def kinds(found: Iterable[str]) -> Iterator[Finding]:
    """Yield the kinds of this machine's GPUs, which the report compares over ranks."""
    counts = Counter(sorted(found))
    if len(counts) == 1:
        yield Finding("kind of GPU", *counts)
    elif counts:
        value = " + ".join(f"{count} x {kind}" for kind, count in counts.items())
        yield Finding("kind of GPU", value, NOTE, "the slowest rank sets the pace", share_by_speed())


def asked(library: ModuleType, function: str, handle: Any) -> Any:
    """Return the driver's answer; None if it refuses the query."""
    try:
        return getattr(library, function)(handle)
    except library.NVMLError:
        return None


def links() -> Iterator[Finding]:
    """Yield the lines of nvidia-smi's matrix of GPUs and network cards, if there are several devices."""
    command = ["nvidia-smi", "topo", "-m"]
    text, reason = "", ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeouts.TOPOLOGY_S)
        text = done.stdout
        if done.returncode:
            reason = (done.stderr or text).strip().partition("\n")[0] or f"ended with code {done.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"no answer within {timeouts.TOPOLOGY_S:g} s"
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        why = f"{' '.join(command)}: {printable(reason)}"
        yield Finding("links", "unknown", NOTE, why, "see whether nvidia-smi works")
    elif len(re.findall(r"^(?:GPU|NIC)\d+\t", text, re.MULTILINE)) > 1:
        lines = re.sub(r"\x1b\[\d*m", "", text).expandtabs().splitlines()  # the header is underlined
        yield from (Finding("links", line.rstrip()) for line in lines if line.strip())


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
        yield find(
            not known, f"GPU {index} of torch",
            f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}", ERROR,
            f"torch only has kernels for {', '.join(kernels)}", "install a torch that has kernels for it",
        )  # fmt: skip
    yield Finding("NCCL between GPUs", "not tested", NOTE, "", "echelon bench measures its collectives")
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    barred = [f"{i} to {j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    if pairs:
        yield find(
            barred, "peer access", f"not from GPU {', '.join(barred)}" if barred else "between all GPUs", WARNING,
            "their copies go through host memory", "see IOMMU and ACS in NCCL's troubleshooting page",
        )  # fmt: skip
