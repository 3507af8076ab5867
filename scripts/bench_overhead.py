"""Measures what Echelon costs beside PyTorch itself: per step, under DDP, and until the first step.

    python scripts/bench_overhead.py [--quick] [--json FILE]      # pip install -e '.[peers]' adds the other trainers

Every loop lives in a thread of its own, and they take turns: one block of steps each, in an order that is reversed every
round. So a machine that slows down or speeds up does so for all of them, and set-up and end are not measured. A ratio is the
median, over rounds, of the ratio within the round; a time is the median over rounds.
"""

import contextlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import overhead_loops as loops
import torch
from bench_report import Goal, Row, at_most, installed, machine, parser, report
from overhead_loops import LOG_EVERY, MLP, TRANSFORMER, Task
from torch import Tensor

from trainer.launch import Place

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "lightning", "accelerate", "transformers", "pytorch-ignite")

# Name -> the loop, the package that it needs, and what it does beside training.
LOOPS: dict[str, tuple[Callable[..., None], str, str]] = {
    "bare loop": (loops.bare, "torch", "keeps the loss"),
    "bare loop, one parameter group": (loops.bare_in_one_group, "torch", "keeps the loss"),
    "Echelon": (loops.echelon, "torch", "gradient norm"),
    "Echelon, default observers": (loops.echelon_observed, "torch", "gradient norm; terminal, TensorBoard, metrics.jsonl, speed"),
    "Fabric": (loops.fabric, "lightning", "CSV file"),
    "ignite": (loops.ignite, "pytorch-ignite", "keeps the loss"),
    "Accelerate": (loops.accelerate, "accelerate", "keeps the loss"),
    "Hugging Face Trainer": (loops.hugging_face, "transformers", "keeps the loss; terminal"),
    "Lightning": (loops.lightning, "lightning", "CSV file"),
}


class Turns(threading.Thread):
    """One loop. Each `turn` lets it take `warm` batches, then those of a log interval, which are timed."""

    def __init__(self, train: Callable[..., None], task: Task, rounds: int, warm: int, folder: Path) -> None:
        super().__init__(daemon=True)
        torch.manual_seed(0)
        self.pool = [task.batch() for _ in range(64)]
        self.sizes = (warm, LOG_EVERY - warm % LOG_EVERY)
        self.train = partial(train, task, self, rounds * sum(self.sizes) + 1, folder)
        self.wall_us: list[float] = []  # of a step, one value a round
        self.cpu_us: list[float] = []  # of this thread
        self.error: Exception | None = None
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.start()
        self.turn()  # set-up

    def run(self) -> None:
        self.go.acquire()
        torch.set_num_threads(1)  # holds for the thread that says it
        try:
            self.train()
        except Exception as error:
            self.error = error
        self.done.release()

    def turn(self) -> None:
        self.go.release()
        self.done.acquire()
        if self.error is not None:
            raise self.error

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        warm, timed = self.sizes
        while True:
            self.done.release()
            self.go.acquire()
            yield from self._batches(warm)
            wall, cpu = time.perf_counter(), time.thread_time()
            yield from self._batches(timed)
            self.wall_us.append((time.perf_counter() - wall) / timed * 1e6)
            self.cpu_us.append((time.thread_time() - cpu) / timed * 1e6)

    def _batches(self, n: int) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.pool[i % len(self.pool)] for i in range(n))


def measure(trains: dict[str, Callable[..., None]], task: Task, rounds: int, warm: int) -> dict[str, Turns]:
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        runs = {name: Turns(train, task, rounds, warm, Path(folder)) for name, train in trains.items()}
        for n in range(rounds):
            for run in list(runs.values())[:: -1 if n % 2 else 1]:
                run.turn()
        for run in runs.values():
            run.turn()
            run.join()
    return runs


def table(part: str, runs: dict[str, Turns], base: str, does: dict[str, str]) -> list[Row]:
    def ratio(own: list[float], others: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(own, others, strict=True))

    return [
        {
            part: name,
            "us a step": statistics.median(run.wall_us),
            "ratio": ratio(run.wall_us, runs[base].wall_us),
            "CPU us a step": statistics.median(run.cpu_us),
            "CPU ratio": ratio(run.cpu_us, runs[base].cpu_us),
            f"every {LOG_EVERY} steps": does[name],
        }
        for name, run in runs.items()
    ]
