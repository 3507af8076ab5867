"""The numbers of a real driver: in range, and those that a load changes do change."""

import time

import pytest
import torch
from support.gpu import on_device, only_gpu

from trainer.comm.affinity import pci_address
from trainer.monitors.gpu_monitor.nvml import watch_gpu

pytestmark = [*on_device, only_gpu]
DEVICE = torch.device("cuda", 0)
MOST = {"gpu/utilisation": 1.0, "gpu/power_w": 2000.0, "gpu/temperature_c": 120.0, "gpu/sm_mhz": 5000.0}


def watched():
    pytest.importorskip("pynvml")
    properties = torch.cuda.get_device_properties(DEVICE)
    return watch_gpu(str(properties.uuid), pci_address(DEVICE), lambda bits: None)


def test_numbers_are_in_range():
    source = watched()
    sample = next(source)
    assert {"gpu/memory_gib", "gpu/temperature_c"} <= sample.keys()
    for name, most in MOST.items():
        assert 0 <= sample.get(name, 0.0) <= most, (name, sample)
    source.close()


def test_memory_is_that_of_the_device_in_use():
    source = watched()
    torch.cuda.empty_cache()  # of tests before, where the new tensor would have its place
    before = next(source)["gpu/memory_gib"]
    held = torch.ones(1 << 28, device=DEVICE)  # 1 GiB
    torch.cuda.synchronize()
    after = next(source)["gpu/memory_gib"]
    source.close()
    assert held.numel() and after - before >= 0.99


def test_a_busy_gpu_is_busy():
    source, factor = watched(), torch.ones(4096, 4096, device=DEVICE)
    if "gpu/utilisation" not in next(source):
        pytest.skip("a slice of MIG has no utilisation")
    deadline, found = time.monotonic() + 30, 0.0
    while found < 0.5 and time.monotonic() < deadline:
        for _ in range(200):
            factor @ factor
        found = next(source)["gpu/utilisation"]
        torch.cuda.synchronize()
    source.close()
    assert found >= 0.5
