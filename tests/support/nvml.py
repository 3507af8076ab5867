"""libnvidia-ml.so.1 in Python, below the real package nvidia-ml-py: its functions fill the real structures."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pynvml

OK = pynvml.NVML_SUCCESS


@dataclass
class Device:
    """A GPU; `codes` has errors by C function, such as {"nvmlDeviceGetPowerUsage": NVML_ERROR_NOT_SUPPORTED}."""

    uuid: str = "GPU-8f1c"
    pci: str = "0000:3b:00.0"
    name: str = "NVIDIA H100 80GB HBM3"
    utilisation: int = 90  # percent
    memory: int = 40 << 30
    memory_total: int = 80 << 30
    milliwatts: int = 650_000
    limit_milliwatts: int = 700_000
    celsius: int = 61
    sm_mhz: int = 1755
    memory_mhz: int = 2619
    reasons: int = 0
    pcie: tuple[int, int] = (2048, 4096)  # KiB/s: sent, received
    nvlink: list[int] = field(default_factory=lambda: [0, 0])  # KiB so far: sent, received
    mig: bool = False
    width: int = 16
    most_width: int = 16
    codes: dict[str, int] = field(default_factory=dict)


class Library:
    """What ctypes would load. Each function returns a code, and fills what `byref` points to."""

    def __init__(self, *devices: Device, init: int = OK, driver: str = "580.65.06", cuda: int = 13000) -> None:
        self.devices, self.init, self.driver, self.cuda = devices, init, driver, cuda
        self.inits = self.shutdowns = 0
        self.missing: set[str] = set()  # functions that an older driver lacks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvmlDevice") and name not in self.missing and (function := FUNCTIONS.get(name)):
            return lambda *args: self._on_device(name, function, *args)
        raise AttributeError(name)

    def _on_device(self, name: str, function: Any, handle: Any, *args: Any) -> int:
        device = self.devices[(ctypes.cast(handle, ctypes.c_void_p).value or 0) - 1]
        if code := device.codes.get(name, OK):
            return code
        return function(device, *args) or OK

    def nvmlInitWithFlags(self, flags: int) -> int:
        self.inits += 1
        return self.init

    def nvmlShutdown(self) -> int:
        self.shutdowns += 1
        return OK

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.devices)
        return OK

    def nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:
        text.value = self.driver.encode()
        return OK

    def nvmlSystemGetCudaDriverVersion_v2(self, version: Any) -> int:
        version._obj.value = self.cuda
        return OK

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        if index.value >= len(self.devices):
            return pynvml.NVML_ERROR_INVALID_ARGUMENT
        return self._hand_out(index.value, handle)

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int:
        return self._look("uuid", uuid.value.decode(), handle)

    def nvmlDeviceGetHandleByPciBusId_v2(self, address: Any, handle: Any) -> int:
        return self._look("pci", address.value.decode(), handle)

    def _look(self, attribute: str, value: str, handle: Any) -> int:
        found = [i for i, device in enumerate(self.devices) if getattr(device, attribute) == value]
        return self._hand_out(found[0], handle) if found else pynvml.NVML_ERROR_NOT_FOUND

    def _hand_out(self, index: int, handle: Any) -> int:
        if code := self.devices[index].codes.get("handle", OK):
            return code
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = index + 1
        return OK


def put(attribute: str) -> Any:
    """Return a C function that fills an integer."""

    def function(device: Device, *args: Any) -> None:
        args[-1]._obj.value = getattr(device, attribute)

    return function


def utilisation(device: Device, rates: Any) -> None:
    rates._obj.gpu, rates._obj.memory = device.utilisation, 10


def memory(device: Device, info: Any) -> None:
    info._obj.total, info._obj.used = device.memory_total, device.memory
    info._obj.free = device.memory_total - device.memory


def pcie(device: Device, counter: Any, value: Any) -> None:
    value._obj.value = device.pcie[counter.value]


def clock(device: Device, kind: Any, mhz: Any) -> None:
    mhz._obj.value = {pynvml.NVML_CLOCK_SM: device.sm_mhz, pynvml.NVML_CLOCK_MEM: device.memory_mhz}[kind.value]


def fields(device: Device, count: Any, values: Any) -> None:
    ids = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
    for value in values._obj:
        assert value.scopeId == 0xFFFFFFFF  # all links
        value.nvmlReturn = device.codes.get("nvlink", OK)
        value.value.ullVal = device.nvlink[ids.index(value.fieldId)]


def text(attribute: str) -> Any:
    def function(device: Device, buffer: Any, size: Any) -> None:
        buffer.value = getattr(device, attribute).encode()

    return function


def pci_info(device: Device, info: Any) -> None:
    info._obj.busId = f"0000{device.pci.upper()}".encode()


def mig(device: Device, current: Any, pending: Any) -> int | None:
    current._obj.value = pending._obj.value = int(device.mig)
    return None


FUNCTIONS = {
    "nvmlDeviceGetUtilizationRates": utilisation,
    "nvmlDeviceGetMemoryInfo": memory,
    "nvmlDeviceGetPowerUsage": put("milliwatts"),
    "nvmlDeviceGetEnforcedPowerLimit": put("limit_milliwatts"),
    "nvmlDeviceGetTemperature": put("celsius"),
    "nvmlDeviceGetClockInfo": clock,
    "nvmlDeviceGetCurrentClocksThrottleReasons": put("reasons"),
    "nvmlDeviceGetPcieThroughput": pcie,
    "nvmlDeviceGetFieldValues": fields,
    "nvmlDeviceGetCurrPcieLinkWidth": put("width"),
    "nvmlDeviceGetMaxPcieLinkWidth": put("most_width"),
    "nvmlDeviceGetName": text("name"),
    "nvmlDeviceGetUUID": text("uuid"),
    "nvmlDeviceGetPciInfo_v3": pci_info,
    "nvmlDeviceGetMigMode": mig,
}


@contextmanager
def loaded(*devices: Device, **more: Any) -> Iterator[Library]:
    """Have the package call this library in the place of the driver's, in this process."""
    library = Library(*devices, **more)
    before = pynvml.nvmlLib
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()
    try:
        yield library
    finally:
        pynvml.nvmlLib = before
        pynvml._nvmlGetFunctionPointer_cache.clear()
