"""Measures a cell in this process."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scripts.bench.bert.cells import Cell
from scripts.bench.bert.kernels import STEPS, Kernels
from scripts.bench.bert.loops import LOOPS, Ended, Job, Ticks, train
from scripts.bench.bert.recipe import RandomText
from trainer.callback import Callback
from trainer.config.options import CheckpointOptions
from trainer.monitors.memory.allocator import GIB, peak_resident
from trainer.monitors.throughput import PEAKS
from trainer.parallel.warmup import wait


def measure(cell: Cell, folder: Path) -> dict[str, float]:
    """Train the cell in `folder`, and return what its table shows.

    Raises:
        ConfigError: The trainer can't do what the cell wants.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    return PARTS[cell.part](cell, device, folder)


class Clock:
    """Times the steps after the warm ones, and the device's peak memory in these."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.warm, self.timed, self.device = cell.warm, cell.timed, device
        self.steps, self.began, self.seconds = 0, 0.0, 0.0

    def tick(self) -> None:
        self.steps += 1
        if self.steps == self.warm:
            wait(self.device)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            self.began = time.perf_counter()
        elif self.steps == self.warm + self.timed:
            wait(self.device)
            self.seconds = (time.perf_counter() - self.began) / self.timed

    def peak_gib(self) -> float:
        cuda = self.device.type == "cuda"
        return (torch.cuda.max_memory_allocated(self.device) if cuda else peak_resident()) / GIB


def time_steps(cell: Cell, device: torch.device, folder: Path) -> dict[str, float]:
    """Return the time of a step, tokens per second, MFU in bf16 if the device's peak is known, and the peak memory."""
    clock, recipe = Clock(cell, device), RandomText(cell)
    run, _ = LOOPS[cell.trainer]
    run(Job(cell, recipe, device, folder, clock.tick))
    rate = cell.micro / clock.seconds
    found = {"ms a step": 1000 * clock.seconds, "tokens/s": rate * cell.sequence, "peak GiB": clock.peak_gib()}
    known = PEAKS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return {**found, "MFU": rate * recipe.flops_per_sample / (known[0] * 1e12)} if known else found


def profile_steps(cell: Cell, device: torch.device, folder: Path) -> dict[str, float]:
    """Return the milliseconds of a step by kind of kernel."""
    kernels, steps = Kernels(device), 0

    def tick() -> None:
        nonlocal steps
        steps += 1
        if steps >= cell.warm:
            wait(device)
            kernels.tick()

    job = Job(cell, RandomText(cell), device, folder, tick)
    train(job, Ticks(tick, cell.warm + STEPS), CheckpointOptions(every_steps=None))
    return kernels.ms


class Stall(Callback):
    """Times the steps of a run with one checkpoint, until it is written."""

    def __init__(self, at: int) -> None:
        self.at, self.ends = at, list[float]()  # ends[i]: when step i + 1 had ended

    def on_step_end(self, trainer: Any) -> None:
        wait(trainer.device)
        self.ends.append(time.perf_counter())
        if trainer.step > self.at + 1 and trainer.saver.newest is not None:
            raise Ended


def time_checkpoint(cell: Cell, device: torch.device, folder: Path) -> dict[str, float]:
    """Return by how much a checkpoint delays the steps beside it, how long it is written, and its size."""
    at = cell.warm + cell.timed
    options = CheckpointOptions(str(folder / "ckpt"), every_steps=at, every_minutes=None, when_busy="skip")
    stall = Stall(at)
    train(Job(cell, RandomText(cell), device, folder, lambda: None), stall, options)
    steps = [end - begin for begin, end in zip(stall.ends, stall.ends[1:])]
    quiet, beside = steps[cell.warm - 1 : at - 1], steps[at - 1 :]
    usual = sum(quiet) / len(quiet)
    saved = next(folder.glob(f"ckpt/*/step-{at:08}"))
    return {
        "ms a step": 1000 * usual,
        "stall, ms": 1000 * (sum(beside) - usual * len(beside)),
        "first step beside, ms more": 1000 * (beside[0] - usual),
        "steps until written": float(len(beside)),
        "GiB": sum(file.stat().st_size for file in saved.iterdir()) / GIB,
    }


PARTS: dict[str, Callable[[Cell, torch.device, Path], dict[str, float]]] = {
    "speed": time_steps,
    "launches": time_steps,
    "kernels": profile_steps,
    "snapshot": time_checkpoint,
}


def one_gpu() -> None:
    """Hide all GPUs but the first: other trainers would take all of them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
