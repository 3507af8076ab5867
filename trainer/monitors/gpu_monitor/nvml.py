"""Reads one GPU through NVML, with NVIDIA's package nvidia-ml-py. Other packages named pynvml lack functions."""

import contextlib
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from trainer.log import log

GIB = 1 << 30
EVERY_LINK = (1 << 32) - 1  # scope of a field: the sum over NVLink's links
SLOWDOWNS = {  # bits of NVML's reasons that take speed away; without: idle, clocks that somebody chose
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "power brake by the power supply",
}
MISSING = "the package nvidia-ml-py is missing; pip install 'nvidia-ml-py>=12.535,<14'"


def unusable(error: BaseException) -> str:
    """Return why NVML can't be used at all, and the fix."""
    name = type(error).__name__.removeprefix("NVMLError_")
    ways = {
        "LibraryNotFound": "this machine or container has no NVIDIA driver; give containers "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        "DriverNotLoaded": "load the NVIDIA driver, for example by nvidia-smi as root",
        "NoPermission": "give this user, or the container, access to /dev/nvidiactl and /dev/nvidia*",
        "LibRmVersionMismatch": "the driver was updated under a running kernel; restart the machine",
    }
    return f"NVML: {error}; {ways.get(name, 'see whether nvidia-smi works')}"


@contextlib.contextmanager
def opened() -> Iterator[ModuleType]:
    """Load and initialise NVML. Raises RuntimeError with the reason and the fix if NVML fails, also later."""
    try:
        import pynvml
    except ImportError:
        raise RuntimeError(MISSING) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise RuntimeError(unusable(error)) from None
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise RuntimeError(unusable(error)) from None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def find(nvml: ModuleType, uuid: str, pci_address: str) -> Any:
    """Return NVML's handle of a CUDA device. Its index would not do, because CUDA_VISIBLE_DEVICES changes it.

    Args:
        uuid: As torch reports it, without a prefix.
        pci_address: As in /sys/bus/pci/devices.
    """
    for look, key in (
        (nvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}"),
        (nvml.nvmlDeviceGetHandleByUUID, f"MIG-{uuid}"),
        (nvml.nvmlDeviceGetHandleByPciBusId, pci_address),
    ):
        try:
            return look(key)
        except (nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument):
            continue
        except nvml.NVMLError as error:
            raise RuntimeError(f"NVML: {key}: {error}; see whether nvidia-smi shows it") from None
    raise RuntimeError(f"NVML: has no GPU-{uuid}, MIG-{uuid} or {pci_address}; see `nvidia-smi -L`")


class Gpu:
    """Reads the numbers of one GPU. Those that it refuses are dropped; one log line names all refused at a time.

    `reasons` has the bits of `SLOWDOWNS` of the last sample.
    """

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self.nvml, self.handle, self.reasons = nvml, handle, 0
        self.sent: tuple[float, float] | None = None  # MiB over NVLink so far, and the time
        self.asked: dict[str, Callable[[], float | None]] = {
            "gpu/utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu/memory_gib": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
            "gpu/power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu/temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "gpu/sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "gpu/memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "gpu/throttled": self._throttled,
            "gpu/pcie_rx_mib_s": lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES) / 1024,
            "gpu/pcie_tx_mib_s": lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES) / 1024,
            "gpu/nvlink_mib_s": self._nvlink,
        }
        self.passing = (nvml.NVMLError_Timeout, nvml.NVMLError_InUse, nvml.NVMLError_NoData, nvml.NVMLError_Unknown)
        self.lost = (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired, nvml.NVMLError_GpuNotFound)
        self.reported: set[str] = set()  # numbers that have failed, and may come back

    def sample(self) -> dict[str, float]:
        """Read all numbers, which takes about 50 ms: PCIe's are counted over 20 ms each.

        Raises:
            RuntimeError: The GPU has stopped answering.
        """
        found, refused = dict[str, float](), list[str]()
        for name, ask in list(self.asked.items()):
            try:
                value = ask()
            except self.lost as error:
                raise RuntimeError(f"NVML: {error}; see the kernel's log for Xid, and restart the node") from None
            except self.nvml.NVMLError as error:
                if name not in self.reported:
                    refused.append(f"{name} ({error})")
                    self.reported.add(name)
                if not isinstance(error, self.passing):
                    del self.asked[name]
            else:
                found |= {} if value is None else {name: float(value)}
        if refused:
            log.info("gpu_monitor: NVML gives no %s; the other numbers are measured", ", ".join(refused))
        return found

    def _throttled(self) -> float:
        self.reasons = self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle) & sum(SLOWDOWNS)
        return float(self.reasons != 0)

    def _nvlink(self) -> float | None:
        """Return MiB/s over all links, in both directions, since the last call; None at first."""
        nvml = self.nvml
        ids = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        values = nvml.nvmlDeviceGetFieldValues(self.handle, [(field, EVERY_LINK) for field in ids])
        if codes := [value.nvmlReturn for value in values if value.nvmlReturn]:
            raise nvml.NVMLError(codes[0])
        now = sum(value.value.ullVal for value in values) / 1024, time.monotonic()
        before, self.sent = self.sent, now
        return (now[0] - before[0]) / (now[1] - before[1]) if before else None


def watch_gpu(uuid: str, pci_address: str, slowed: Callable[[int], None]) -> Iterator[dict[str, float]]:
    """Yield the numbers of a GPU endlessly; end with one log line if it can't be read any more.

    `slowed` takes the bits of `SLOWDOWNS` of each sample.
    """
    try:
        with opened() as nvml:
            gpu = Gpu(nvml, find(nvml, uuid, pci_address))
            while gpu.asked:
                sample = gpu.sample()
                slowed(gpu.reasons)
                yield sample
    except RuntimeError as error:
        log.warning("gpu_monitor: no numbers of the GPU: %s", error)
