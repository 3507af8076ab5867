"""Measures a cell in this process."""

import os
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from scripts.bench import trainers
from scripts.bench.harness import Failed, Turn
from scripts.bench.hosts import Over
from scripts.bench.one_gpu.cells import TINY, Cell
from scripts.bench.one_gpu.clock import Clock, Ticks
from scripts.bench.one_gpu.fixed_tests import run_tests
from scripts.bench.one_gpu.images import time_images
from scripts.bench.one_gpu.recipe import RandomText
from scripts.bench.one_gpu.turns import time_turns
from scripts.bench.trainers import Job, observers
from trainer.callback import Callback
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.compile import Compile
from trainer.config.options import CheckpointOptions
from trainer.errors import ConfigError, is_out_of_memory
from trainer.monitors.memory.allocator import GIB
from trainer.monitors.throughput import PEAKS
from trainer.optim.factories import adamw
from trainer.parallel.warmup import wait

PROFILED = 3  # steps
MODES = {"blocks, graphs": "reduce-overhead", "blocks, autotuned": "max-autotune-no-cudagraphs"}
# Kind -> pattern of the names of its kernels, or of its operations on a CPU. The first that matches counts.
KERNELS = {
    "attention": r"flash|fmha|attention|sdpa",
    "optimizer": r"multi_tensor|adam|foreach",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|mm\b|linear",
    "norms and softmax": r"norm|softmax",
    "copies and casts": r"memcpy|memset|copy|_to_copy",
    "fused by Inductor": r"triton",
    "elementwise and reductions": r"elementwise|reduce|aten::|vectorized|dropout|gelu|embedding|index|gather|scatter",
}


def attempt(cell: Cell, folder: str) -> Turn:
    """Measure the cell in a process of its own.

    Raises:
        Failed: It is refused, has too little memory, or has an error that nobody expects: then with the traceback.
    """
    os.chdir(folder)
    log = os.open("log", os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(log, stream)
    one_gpu()
    if cell.size == TINY:
        torch.set_num_threads(1)
    try:
        return measure(cell, Path(folder))
    except ConfigError as error:
        raise Failed(f"refused: {error}") from None
    except Exception as error:
        if is_out_of_memory(error):
            raise Failed(f"out of memory ({' '.join(str(error).split())[:200]})") from None
        raise Failed(traceback.format_exc()) from None


def one_gpu() -> None:
    """Hide all GPUs but the first: other trainers would take all of them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]


def measure(cell: Cell, folder: Path) -> dict[str, float]:
    """Train the cell in `folder`, and return what its table shows.

    Raises:
        ConfigError: The trainer can't do what the cell wants.
    """
    device = torch.device("cpu") if cell.size == TINY else torch.device("cuda", 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    return KINDS[cell.kind](cell, device, folder)


def job_of(cell: Cell, device: torch.device, folder: Path, tick: Callable[[], None]) -> Job:
    """Return the job of a cell: two workers load the same samples for each trainer, into pinned memory on a GPU."""
    recipe, cuda, steps = RandomText(cell), device.type == "cuda", cell.warm + cell.timed

    def loader() -> DataLoader[Any]:
        data = recipe.data("train")
        sampler = torch.randint(len(data), (steps * cell.micro,)).tolist()
        return DataLoader(data, cell.micro, sampler=sampler, num_workers=2 * cuda, pin_memory=cuda)

    return Job(
        recipe, loader, cell.micro, steps, folder, partial(adamw, lr=1e-4), device, tick, cell.precision,
        cell.backend if cell.compiled != "no" else "", 2 * cuda, cell.compiled != "whole", mode_of(cell),
    )  # fmt: skip


def mode_of(cell: Cell) -> str | None:
    """Return the mode of Inductor; other backends have none."""
    return MODES.get(cell.compiled) if cell.backend == "inductor" else None


def echelon(cell: Cell, job: Job, watch: Callback, checkpoint: CheckpointOptions | None = None) -> None:
    """Train with Echelon until `watch` raises `Over`, with the default observers but TensorBoard.

    Raises:
        ConfigError: Echelon can't do what the cell wants.
    """
    callbacks = {**observers(), **changes(cell), "watch": watch}
    trainers.echelon(replace(job, steps=100_000), callbacks, checkpoint=checkpoint)


def changes(cell: Cell) -> dict[str, Callback]:
    found: dict[str, Callback] = {}
    if cell.compiled != "no":
        found["compile"] = Compile(whole=cell.compiled == "whole", backend=cell.backend, mode=mode_of(cell))
    if cell.recompute.startswith("budget="):
        found["activation_checkpoint"] = ActivationCheckpoint(budget=float(cell.recompute.removeprefix("budget=")))
    elif cell.recompute != "no":
        found["activation_checkpoint"] = ActivationCheckpoint(policy=cell.recompute)  # pyright: ignore[reportArgumentType]
    return found


LOOPS: dict[str, Callable[[Job], None]] = {
    "bare loop": trainers.bare,
    "Hugging Face Trainer": trainers.hugging_face,
    "Lightning": trainers.lightning,
}


def time_steps(cell: Cell, device: torch.device, folder: Path) -> dict[str, float]:
    clock = Clock(cell, device)
    job = job_of(cell, device, folder, clock.tick)
    if cell.trainer == "Echelon":
        echelon(cell, job, Ticks(job.tick, job.steps))
    else:
        LOOPS[cell.trainer](job)
    rate = cell.micro / clock.seconds
    found = {"ms a step": 1000 * clock.seconds, "tokens/s": rate * cell.sequence, "peak GiB": clock.peak_gib()}
    known = PEAKS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return {**found, "MFU": rate * job.recipe.flops_per_sample / (known[0] * 1e12)} if known else found


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KERNELS.items() if re.search(pattern, name, re.IGNORECASE)), "others")


def profile_steps(cell: Cell, device: torch.device, folder: Path) -> dict[str, float]:
    cuda, steps, ms = device.type == "cuda", 0, dict[str, float]()
    profiler = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])

    def tick() -> None:
        nonlocal steps
        steps += 1
        if steps >= cell.warm:
            wait(device)
        if steps == cell.warm:
            profiler.start()
        elif steps == cell.warm + PROFILED:
            profiler.stop()

    echelon(cell, job_of(cell, device, folder, tick), Ticks(tick, cell.warm + PROFILED))
    for event in profiler.key_averages():
        if own := event.self_device_time_total if cuda else event.self_cpu_time_total:
            ms[kind_of(event.key)] = ms.get(kind_of(event.key), 0.0) + own / 1000 / PROFILED
    return ms


class Stall(Callback):
    """Times the steps of a run with one checkpoint, until it is written."""

    def __init__(self, at: int) -> None:
        self.at, self.ends = at, list[float]()  # ends[i]: when step i + 1 had ended

    def on_step_end(self, trainer: Any) -> None:
        wait(trainer.device)
        self.ends.append(time.perf_counter())
        if trainer.step > self.at + 1 and trainer.saver.newest is not None:
            raise Over


def time_checkpoint(cell: Cell, device: torch.device, folder: Path) -> dict[str, float]:
    at = cell.warm + cell.timed
    options = CheckpointOptions(str(folder / "ckpt"), every_steps=at, every_minutes=None, when_busy="skip")
    stall = Stall(at)
    echelon(cell, job_of(cell, device, folder, lambda: None), stall, options)
    steps = [end - begin for begin, end in zip(stall.ends, stall.ends[1:])]
    quiet, during = steps[cell.warm - 1 : at - 1], steps[at - 1 :]
    usual = sum(quiet) / len(quiet)
    saved = next(folder.glob(f"ckpt/*/step-{at:08}"))
    return {
        "ms a step": 1000 * usual, "stall, ms": 1000 * (sum(during) - usual * len(during)),
        "first step during, ms more": 1000 * (during[0] - usual), "steps until written": float(len(during)),
        "GiB": sum(file.stat().st_size for file in saved.iterdir()) / GIB,
    }  # fmt: skip


KINDS: dict[str, Callable[[Cell, torch.device, Path], dict[str, float]]] = {
    "tests": run_tests, "turns": time_turns, "speed": time_steps, "kernels": profile_steps, "snapshot": time_checkpoint,
    "images": time_images,
}  # fmt: skip
