"""Runs with the monitor: its numbers over ranks, on a machine without a GPU and with faked ones, and its end."""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cli import toy
from support.nvml import Device, loaded
from support.ranks import run_ranks
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError
from trainer.loggers.metrics_file import MetricsFile
from trainer.monitors.gpu_monitor import callback
from trainer.monitors.gpu_monitor.callback import GpuMonitor
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")

HOST = {"host/ram_gib", "host/cpu", "host/network_rx_mib_s", "host/network_tx_mib_s"}


class Waiting(Toy):
    """Waits in each loss until the monitor has sampled twice more, or fails."""

    def __init__(self, monitor: GpuMonitor | None = None, fail: bool = False) -> None:
        super().__init__()
        self.monitor, self.fail = monitor, fail

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if self.fail:
            raise RuntimeError("of the recipe")
        deadline = time.monotonic() + 20
        while self.monitor and (sampler := self.monitor.sampler) and len(sampler.samples) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return super().loss(model, batch)


def make(recipe: Toy, monitor: GpuMonitor, place: Place | None = None) -> Trainer:
    return Trainer(
        recipe, {"gpu_monitor": monitor, "metrics_file": MetricsFile()}, batch=12,
        options=Options(max_steps=4, log_every_steps=2, run_dir="runs/r"), data=DataOptions(workers=0), place=place,
    )  # fmt: skip


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "gpu_monitor"]


def rank(place: Place) -> tuple[dict[str, float], list[str], bool]:
    monitor = GpuMonitor(every_s=0.005)
    trainer = make(Waiting(monitor), monitor, place)
    trainer.fit()
    return trainer.last_metrics, threads(), bool(monitor.sampler and monitor.sampler.newest)


def test_the_host_on_a_machine_without_a_gpu_once_for_its_ranks():
    (first, left, measured), (second, also_left, also_measured) = run_ranks(2, rank)
    assert left == also_left == [] and (measured, also_measured) == (True, False)
    assert first.keys() >= HOST and not [name for name in first if name.startswith("gpu/")]
    assert {name: first[name] for name in HOST} == {name: second[name] for name in HOST}
    written = [json.loads(line) for line in Path("runs/r/metrics.jsonl").read_text().splitlines()]
    assert [line.keys() >= HOST for line in written if "train/loss" in line] == [True, True]


def test_the_thread_ends_with_a_run_that_fails():
    monitor = GpuMonitor(every_s=0.005)
    trainer = make(Waiting(fail=True), monitor)
    with pytest.raises(RuntimeError, match="of the recipe"):
        trainer.fit()
    assert monitor.sampler and not monitor.sampler.thread.is_alive() and threads() == []


def test_a_thread_that_can_not_be_started_is_a_warning(monkeypatch):
    """At the limit of processes. What a run asks for at its steps and its end works."""
    said, monitor = list[str](), GpuMonitor()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    trainer: Any = SimpleNamespace(
        device=torch.device("cpu"), ranks=SimpleNamespace(place=Place(), gather=lambda own: [own]), metrics={"a": 1.0}
    )
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(callback.log, "warning", lambda form, *args: said.append(form % args))
    monitor.on_fit_start(trainer)
    monitor.on_step_end(trainer)
    monitor.on_fit_end(trainer)
    assert trainer.metrics == {"a": 1.0}
    assert said == ["gpu_monitor: measures nothing: can't start new thread; see the limit of processes, `ulimit -u`"]


def gpu_rank(place: Place) -> tuple[list[dict[str, float]], list[str]]:
    """Two logged steps of a rank whose GPU is the driver's number 1 - rank; torch and the driver are faked."""
    uuid = "ab"[place.rank]
    devices = [Device("GPU-b", utilisation=100, celsius=70, reasons=0x44), Device("GPU-a", utilisation=50, celsius=60)]
    said, monitor, steps = list[str](), GpuMonitor(every_s=0.005), list[dict[str, float]]()
    trainer: Any = make(Toy(), monitor, place)
    with pytest.MonkeyPatch.context() as patch, loaded(*devices):
        properties = SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(callback.log, "warning", lambda form, *args: said.append(form % args))
        trainer.device = torch.device("cuda", 0)
        monitor.on_fit_start(trainer)
        for step in (1, 2):
            while not monitor.sampler.samples:  # pyright: ignore
                time.sleep(0.002)
            trainer.state.step, trainer.metrics = step, {"train/loss": 1.0}
            monitor.on_step_end(trainer)
            steps.append(trainer.metrics)
        monitor.on_fit_end(trainer)
    trainer.close()
    return steps, said


def test_numbers_of_gpus_over_ranks_and_a_warning_for_each_reason():
    (steps, said), (others, also) = run_ranks(2, gpu_rank)
    assert steps == others
    for metrics in steps:
        assert metrics["train/loss"] == 1.0 and "host/ram_gib" in metrics
        assert metrics["gpu/utilisation"] == 0.75 and metrics["gpu/temperature_c"] == 70.0
        assert metrics["gpu/utilisation_min"] == 0.5 and metrics["gpu/idlest_rank"] == 0  # of the GPU "a"
        assert metrics["gpu/throttled"] == 0.5 and metrics["gpu/utilisation_spread"] == 0.0
    texts = [f"step 1: clocks of the GPU throttled by {why}: rank 1" for why in callback.SLOWDOWNS.values()]
    assert said == also == [texts[0], texts[3]]


def test_in_the_command_one_line_says_that_there_is_no_gpu(tmp_path):
    done = toy(["+callbacks=[gpu_monitor]", "callbacks.gpu_monitor.every_s=0.01", "trainer.max_steps=4"], tmp_path)
    assert done.code == 0, done.err
    assert [line for line in done.out.splitlines() if line.startswith("gpu_monitor")] == [
        "gpu_monitor: the run is on cpu: host/... alone is measured"
    ]


@pytest.mark.parametrize("every_s", [0, -1, float("nan")])
def test_a_pause_that_can_not_be_is_refused(every_s):
    with pytest.raises(ConfigError, match=r"callbacks\.gpu_monitor\.every_s"):
        GpuMonitor(every_s)
