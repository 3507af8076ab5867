"""Rates by hand, on a clock that the test turns."""

from types import SimpleNamespace

import pytest
import torch

from trainer.monitors import throughput
from trainer.monitors.throughput import Throughput


@pytest.fixture
def clock(monkeypatch):
    fake = SimpleNamespace(now=100.0)
    fake.perf_counter = lambda: fake.now
    monkeypatch.setattr(throughput, "time", fake)
    return fake


def fake_trainer(world: int = 2, **recipe: float) -> SimpleNamespace:
    return SimpleNamespace(
        device=torch.device("cpu"), samples=1000, metrics={}, recipe=SimpleNamespace(**recipe), world=world
    )


def logged(callback: Throughput, trainer: SimpleNamespace, samples: int, log: bool = True) -> dict[str, float]:
    trainer.samples += samples
    trainer.metrics = {"train/loss": 1.0} if log else {}
    if log:
        callback.on_step_end(trainer)
    return trainer.metrics


def test_samples_and_tokens_per_second_since_the_last_log_line(clock):
    callback, trainer = Throughput(), fake_trainer(tokens_per_sample=128)
    callback.on_fit_start(trainer)  # resumed: the samples before do not count
    clock.now += 3
    assert logged(callback, trainer, 30, log=False) == {}
    clock.now += 1
    assert logged(callback, trainer, 10) == {
        "train/loss": 1.0, "perf/samples_per_s": 10.0, "perf/tokens_per_s": 1280.0,
    }  # fmt: skip
    clock.now += 0.5
    assert logged(callback, trainer, 16)["perf/samples_per_s"] == 32.0


def test_mfu_is_the_share_of_all_devices_peak(clock):
    """8 samples of 3 TFLOP in 2 s on 2 devices of 10 TFLOP/s: 12 of 20."""
    callback, trainer = Throughput(peak_tflops=10), fake_trainer(flops_per_sample=3e12)
    callback.on_fit_start(trainer)
    clock.now += 2
    numbers = logged(callback, trainer, 8)
    assert numbers["perf/mfu"] == pytest.approx(0.6)
    assert "perf/tokens_per_s" not in numbers


def test_without_a_known_peak_there_is_no_mfu(clock):
    callback, trainer = Throughput(), fake_trainer(flops_per_sample=3e12)
    callback.on_fit_start(trainer)
    clock.now += 2
    assert set(logged(callback, trainer, 8)) == {"train/loss", "perf/samples_per_s"}


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H100 NVL", "fp32", 60.0),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5),
        ("NVIDIA H100", "bf16", None),  # not a board
        ("NVIDIA T1", "bf16", None),
    ],
)
def test_the_peak_of_a_gpu_is_known_by_its_full_name_and_the_precision(name, precision, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    callback, trainer = Throughput(), fake_trainer()
    trainer.device, trainer.precision = torch.device("cuda", 0), SimpleNamespace(name=precision)
    callback.on_fit_start(trainer)
    assert callback.peak == tflops
    given = Throughput(peak_tflops=7.0)
    given.on_fit_start(trainer)
    assert given.peak == 7.0
