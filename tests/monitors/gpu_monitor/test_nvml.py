"""A GPU behind the real nvidia-ml-py, whose driver the test plays: numbers by hand, and one line for each refusal."""

import sys

import pynvml
import pytest
from support.nvml import Device, loaded

from trainer.monitors.gpu_monitor import nvml
from trainer.monitors.gpu_monitor.nvml import Gpu, find, opened, watch_gpu

NUMBERS = {
    "gpu/utilisation": 0.9, "gpu/memory_gib": 40.0, "gpu/power_w": 650.0, "gpu/temperature_c": 61.0,
    "gpu/sm_mhz": 1755.0, "gpu/memory_mhz": 2619.0, "gpu/throttled": 0.0,
    "gpu/pcie_tx_mib_s": 2.0, "gpu/pcie_rx_mib_s": 4.0,
}  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(nvml.time, "monotonic", lambda: now[0])
    return now


def samples(device: Device, count: int, change=lambda i: None, **more) -> tuple[list[dict[str, float]], list[int]]:
    bits = list[int]()
    with loaded(device, **more) as library:
        source = watch_gpu(device.uuid.removeprefix("GPU-"), device.pci, bits.append)
        found = []
        for i in range(count):
            change(i)
            found += [sample] if (sample := next(source, None)) is not None else []
        source.close()
    assert library.inits == library.shutdowns or library.init
    return found, bits


def test_each_number_in_its_unit(messages, clock):
    device = Device()

    def change(i: int) -> None:
        clock[0] += 2.0
        device.nvlink = [i * 1024 * 300, i * 1024 * 100]  # KiB

    (first, second), bits = samples(device, 2, change)
    assert first == NUMBERS
    assert second == NUMBERS | {"gpu/nvlink_mib_s": 200.0}
    assert bits == [0, 0] and messages == []


def test_reasons_that_take_speed_away_are_counted_and_others_are_not():
    device = Device()
    given = [0x1, 0x2 | 0x100, 0x4, 0x40 | 0x1]  # idle; clocks that somebody chose; power cap; thermal
    found, bits = samples(device, 4, lambda i: setattr(device, "reasons", given[i]))
    assert [sample["gpu/throttled"] for sample in found] == [0.0, 0.0, 1.0, 1.0]
    assert bits == [0, 0, 0x4, 0x40]


def test_refused_numbers_are_named_in_one_line_and_never_asked_again(messages):
    device = Device(
        codes={
            "nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_NO_PERMISSION,
            "nvmlDeviceGetUtilizationRates": pynvml.NVML_ERROR_NOT_SUPPORTED,  # as of a MIG slice
            "nvlink": pynvml.NVML_ERROR_NOT_SUPPORTED,  # a card without
        }
    )
    found, _ = samples(device, 3, lambda i: i != 2 or device.codes.clear())
    gone = {"gpu/power_w", "gpu/utilisation"}
    assert [sample.keys() for sample in found] == [NUMBERS.keys() - gone] * 3
    assert messages == [
        "gpu_monitor: NVML gives no gpu/utilisation (Not Supported), gpu/power_w (Insufficient Permissions), "
        "gpu/nvlink_mib_s (Not Supported); the other numbers are measured"
    ]


def test_an_older_driver_lacks_a_function(messages):
    with loaded(Device()) as library:
        library.missing.add("nvmlDeviceGetCurrentClocksThrottleReasons")
        source = watch_gpu("8f1c", "", lambda bits: None)
        assert next(source).keys() == NUMBERS.keys() - {"gpu/throttled"}
        source.close()
    assert messages == ["gpu_monitor: NVML gives no gpu/throttled (Function Not Found); the other numbers are measured"]


def test_an_error_that_may_pass_leaves_out_one_sample(messages):
    device = Device()

    def change(i: int) -> None:
        device.codes = {"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_TIMEOUT} if i % 2 else {}

    found, _ = samples(device, 5, change)
    assert ["gpu/power_w" in sample for sample in found] == [True, False, True, False, True]
    assert len(messages) == 1 and "gpu/power_w (Timeout)" in messages[0]


def test_a_lost_gpu_ends_its_numbers_with_one_line(messages):
    device = Device()

    def change(i: int) -> None:
        device.codes = {"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_GPU_IS_LOST} if i else {}

    found, _ = samples(device, 4, change)
    assert len(found) == 1
    assert messages == [
        "gpu_monitor: no numbers of the GPU: NVML: GPU is lost; see the kernel's log for Xid, and restart the node"
    ]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded; load the NVIDIA driver"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions; give this user"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "the driver was updated under a running kernel"),
        (pynvml.NVML_ERROR_UNKNOWN, "Unknown Error; see whether nvidia-smi works"),
    ],
)
def test_nvml_that_refuses_altogether(messages, code, text):
    assert samples(Device(), 2, init=code) == ([], [])
    assert len(messages) == 1 and text in messages[0] and "\n" not in messages[0]


def test_without_a_driver_or_without_the_package(messages, monkeypatch):
    def no_library(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    with monkeypatch.context() as patch:
        patch.setattr(pynvml, "nvmlInit", no_library)
        assert list(watch_gpu("8f1c", "", lambda bits: None)) == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert list(watch_gpu("8f1c", "", lambda bits: None)) == []
    assert "this machine or container has no NVIDIA driver" in messages[0]
    assert messages[1].endswith("the package nvidia-ml-py is missing; pip install 'nvidia-ml-py>=12.535,<14'")


@pytest.mark.parametrize(
    ("uuid", "pci", "index"),
    [("b", "", 1), ("c", "", 2), ("unknown", "0000:af:00.0", 1), ("a", "0000:af:00.0", 0)],
)
def test_the_device_is_found_by_its_uuid_else_by_its_address(uuid, pci, index):
    """CUDA's numbers are others than NVML's: CUDA_VISIBLE_DEVICES=2,0 gives the third GPU the number 0."""
    devices = [Device("GPU-a", "0000:3b:00.0"), Device("GPU-b", "0000:af:00.0"), Device("MIG-c", "0000:d8:00.0")]
    with loaded(*devices), opened() as library:
        for i, device in enumerate(devices):
            device.milliwatts = 1000 * i
        sample = Gpu(library, find(library, uuid, pci)).sample()
    assert sample["gpu/power_w"] == index


def test_a_device_that_nvml_does_not_know_or_may_not_show(messages):
    with loaded(Device(codes={"handle": pynvml.NVML_ERROR_NO_PERMISSION})):
        assert list(watch_gpu("z", "0000:00:00.0", lambda bits: None)) == []
        assert list(watch_gpu("8f1c", "", lambda bits: None)) == []
    assert "has no GPU-z, MIG-z or 0000:00:00.0; see `nvidia-smi -L`" in messages[0]
    assert "GPU-8f1c: Insufficient Permissions" in messages[1]
