"""GPUs behind the real nvidia-ml-py, whose driver the test plays; torch.cuda is faked."""

import sys as python
from pathlib import Path

import pynvml
import pytest
import torch
from support.nvml import Device, Library, loaded

from trainer import timeouts
from trainer.tools.doctor import gpus
from trainer.tools.doctor.finding import ERROR, NOTE, OK, WARNING, Finding
from trainer.tools.doctor.report import differences

ONE, TWO = "0000:3b:00.0", "0000:af:00.0"


@pytest.fixture
def sys(tmp_path) -> Path:
    for address, node in ((ONE, 0), (TWO, 1)):
        folder = tmp_path / "bus" / "pci" / "devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        (folder / "vendor").write_text("0x10de\n")
        (folder / "class").write_text("0x030200\n")
    return tmp_path


def examine(sys: Path, *devices: Device, **more) -> list[Finding]:
    with loaded(*devices, **more) as library:
        found = list(gpus.examine(sys))
    assert library.inits == library.shutdowns or library.init
    return found


def free(**more) -> Device:
    return Device(memory=1 << 30, **more)


def test_driver_gpus_and_a_torch_that_can_not_use_them(sys):
    driver, first, second, *rest = examine(sys, free(pci=ONE), free(pci=TWO, mig=True))
    assert (driver.subject, driver.value) == ("NVIDIA driver", "580.65.06, up to CUDA 13.0")
    assert first.value == "NVIDIA H100 80GB HBM3, 80 GiB, PCI 0000:3b:00.0, NUMA node 0, PCIe x16" and first.level == OK
    assert second.value.endswith("PCI 0000:af:00.0, NUMA node 1, PCIe x16, MIG")
    none, links = rest[-2:]
    assert (none.subject, none.level) == ("GPUs of torch", WARNING) and "is a CPU build" in none.consequence
    assert links.subject == "links"
    with loaded(free(pci=ONE)):
        assert "links" not in {finding.subject for finding in gpus.examine(sys, first=False)}


def test_what_makes_a_gpu_slow_or_full_or_lost(sys):
    hot, full = free(pci=ONE, reasons=0x40 | 0x1), Device(pci=TWO, memory=40 << 30)
    lost = free(codes={"handle": pynvml.NVML_ERROR_GPU_IS_LOST})
    _, first, second, third, *_ = examine(sys, hot, full, lost)
    assert first.level == WARNING and "throttled by thermal slowdown by the hardware" in first.consequence
    assert second.level == WARNING and second.consequence == "others use 40 GiB of it"
    assert third.level == ERROR and third.line().startswith("GPU 2: NVML: GPU is lost; a rank on it can't start")


def test_a_gpu_in_a_narrow_slot_and_one_that_tells_nothing(sys):
    silent = dict.fromkeys((*gpus.WIDTHS, "nvmlDeviceGetMigMode"), pynvml.NVML_ERROR_NOT_SUPPORTED)
    _, narrow, other, *_ = examine(sys, free(pci=ONE, width=8), free(pci=TWO, codes=silent))
    assert narrow.level == WARNING and narrow.consequence == "it could have PCIe x16, so copies are slower"
    assert other.level == OK and "PCIe" not in other.value


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_NOT_SUPPORTED])
def test_memory_that_the_driver_does_not_tell_is_a_note(sys, code):
    unread = {"nvmlDeviceGetMemoryInfo": code}
    _, first, second, *_ = examine(sys, free(pci=ONE, codes=unread), free(pci=TWO, codes=unread, reasons=0x40))
    assert first.level == NOTE and first.value.startswith("NVIDIA H100 80GB HBM3, PCI 0000:3b:00.0, NUMA node 0")
    assert first.consequence == "the driver does not report its memory, so what others use is unknown"
    assert second.level == WARNING and "thermal" in second.consequence
    lost = free(pci=ONE, codes={"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_GPU_IS_LOST})
    assert examine(sys, lost)[1].level == ERROR


def test_a_driver_that_does_not_tell_its_version_leaves_what_torch_sees(sys, monkeypatch):
    monkeypatch.setattr(Library, "nvmlSystemGetDriverVersion", lambda *_: pynvml.NVML_ERROR_NO_PERMISSION)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    found = {finding.subject: finding for finding in examine(sys, free(pci=ONE))}
    assert found["GPUs"].level == WARNING and "Insufficient Permissions" in found["GPUs"].consequence
    assert found["GPU 0 of torch"].level == OK


H100 = "NVIDIA H100 80GB HBM3, 80 GiB, 700 W"


def between(sys: Path, *machines: list[Device]) -> list[str]:
    """Return what is said of the GPUs of a rank on each machine, where they differ."""
    rows = {rank: examine(sys, *devices) for rank, devices in enumerate(machines)}
    return [finding.line() for finding in differences(rows)]


def test_gpus_in_other_slots_are_equal(sys):
    assert between(sys, [free(pci=ONE), free(pci=TWO)], [free(pci=TWO), free(pci=ONE)]) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"name": "NVIDIA A100"}, f"1 x NVIDIA A100, 80 GiB, 700 W + 1 x {H100}"),
        ({"limit_milliwatts": 500_000}, "1 x NVIDIA H100 80GB HBM3, 80 GiB, 500 W + 1 x "),
        ({"width": 8}, f"{H100}, PCIe x8 of x16"),
        ({"mig": True}, f"{H100}, MIG"),
    ],
)
def test_the_last_of_a_machines_gpus_counts_as_the_first_does(sys, other, words):
    equal = [free(pci=ONE), free(pci=TWO)]
    (line,) = between(sys, equal, [free(pci=ONE), free(pci=TWO, **other)])
    assert line.startswith("kind of GPU differs: ") and line.endswith("see '+callbacks=[hetero_batch]'")
    found = examine(sys, free(pci=ONE), free(pci=TWO, **other))
    (kind,) = [finding for finding in found if finding.subject == "kind of GPU"]
    assert kind.level == NOTE and words in kind.value and "; the slowest rank sets the pace; " in kind.line()


A100 = "NVIDIA A100, 80 GiB, 700 W"


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ("HA", "H", f"1 x {A100} + 1 x {H100} (rank 0) | {H100} (rank 1)"),
        ("HHA", "HAA", f"1 x {A100} + 2 x {H100} (rank 0) | 2 x {A100} + 1 x {H100} (rank 1)"),
        ("HHA", "HHB", f"1 x {A100} (rank 0) | 1 x NVIDIA B200, 80 GiB, 700 W (rank 1)"),
        ("HA", "AH", ""),
        ("HH", "H", ""),  # as fast
    ],
)
def test_kinds_are_compared_whole_and_by_their_numbers(sys, one, other, words):
    names = {"A": {"name": "NVIDIA A100"}, "B": {"name": "NVIDIA B200"}, "H": {}}
    lines = between(sys, *([free(pci=ONE, **names[kind]) for kind in kinds] for kinds in (one, other)))
    assert [line.partition(": ")[2].partition("; ")[0] for line in lines] == ([words] if words else [])


def test_power_limits_of_two_machines(sys):
    (line,) = between(sys, [free(pci=ONE)], [free(pci=ONE, limit_milliwatts=500_000)])
    assert (
        line == "kind of GPU differs: 700 W (rank 0) | 500 W (rank 1); the slowest rank sets the pace; "
        "see '+callbacks=[hetero_batch]'"
    )


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\t0-31\t0
GPU1\tNV18\t X \tSYS\t0-31\t0
NIC0\tPIX\tSYS\t X \t\t

Legend:

  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""


def links(folder: Path, monkeypatch, script: str) -> list[Finding]:
    """Return the findings with a program nvidia-smi that is this script."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return list(gpus.links())


def test_the_matrix_of_nvidia_smi(tmp_path, monkeypatch):
    (tmp_path / "matrix").write_text(TOPOLOGY)
    found = [
        finding.value for finding in links(tmp_path, monkeypatch, f'[ "$*" = "topo -m" ] && cat {tmp_path}/matrix')
    ]
    assert found[0] == "        GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity"
    assert found[1] == "GPU0     X      NV18    PIX     0-31    0" and found[-1] == "  NIC0: mlx5_0"


def test_a_gpu_alone_has_no_matrix(tmp_path, monkeypatch):
    (tmp_path / "matrix").write_text("\tGPU0\tCPU Affinity\nGPU0\t X \t0-31\n\nLegend:\n")
    assert links(tmp_path, monkeypatch, f"cat {tmp_path}/matrix") == []


def test_an_nvidia_smi_that_fails_or_is_missing(sys, tmp_path, monkeypatch):
    for script, reason in {"exit 9": "ended with code 9", "echo no driver >&2; exit 1": "no driver"}.items():
        (failed,) = links(tmp_path, monkeypatch, script)
        assert failed.level == NOTE and failed.consequence == f"nvidia-smi topo -m: {reason}"
    monkeypatch.setattr(timeouts, "TOPOLOGY_S", 0.2)
    (slow,) = links(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pid; exec sleep 60")
    assert slow.level == NOTE and slow.consequence == "nvidia-smi topo -m: no answer within 0.2 s"
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()
    monkeypatch.setenv("PATH", str(tmp_path / "none"))  # empty would be the folder of the test
    (missing,) = [finding for finding in examine(sys, free(pci=ONE)) if finding.subject == "links"]
    assert missing.level == NOTE and missing.consequence == "nvidia-smi topo -m: No such file or directory"


def test_gpus_without_a_driver_and_none_at_all(sys, tmp_path):
    lacking = examine(sys, init=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert lacking[0].level == WARNING and lacking[0].value == f"2 of NVIDIA on the PCI bus ({ONE}, {TWO})"
    assert "Driver Not Loaded; load the NVIDIA driver" in lacking[0].consequence
    (none,) = examine(tmp_path / "empty", init=pynvml.NVML_ERROR_NO_PERMISSION)
    assert none.level == NOTE and none.value == "none found" and "access to /dev/nvidiactl" in none.consequence
    assert examine(tmp_path / "empty")[1].value == "the driver shows none"


def test_without_the_package_the_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(python.modules, "pynvml", None)
    (none,) = gpus.examine(tmp_path)
    assert none.level == NOTE and "pip install 'nvidia-ml-py>=12.535,<14'" in none.consequence


def usable(monkeypatch, *capabilities: tuple[int, int], barred: tuple[tuple[int, int], ...] = ()) -> list[Finding]:
    cuda = {
        "is_available": lambda: True, "device_count": lambda: len(capabilities),
        "get_arch_list": lambda: ["sm_80", "sm_90", "compute_90"], "get_device_name": lambda i: f"GPU of {i}",
        "get_device_capability": lambda i: capabilities[i], "can_device_access_peer": lambda i, j: (i, j) not in barred,
    }  # fmt: skip
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return list(gpus.of_torch(len(capabilities)))


def test_gpus_that_torch_can_use(monkeypatch):
    found = usable(monkeypatch, (9, 0), (8, 6))
    assert [(finding.subject, finding.level) for finding in found] == [
        ("GPU 0 of torch", OK), ("GPU 1 of torch", OK), ("NCCL between GPUs", NOTE), ("peer access", OK)
    ]  # fmt: skip


def test_a_gpu_without_kernels_and_gpus_without_peer_access(monkeypatch):
    old, *_, peers = usable(monkeypatch, (7, 0), (9, 0), barred=((0, 1),))
    assert old.level == ERROR and "sm_80, sm_90" in old.consequence
    assert peers.level == WARNING and peers.value == "not from GPU 0 to 1"
