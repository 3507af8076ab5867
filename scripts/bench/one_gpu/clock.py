"""Times the steps of a cell, whichever trainer makes them."""

import time
from collections.abc import Callable
from typing import Any

import torch

from scripts.bench.hosts import Over
from scripts.bench.one_gpu.cells import Cell
from trainer.callback import Callback
from trainer.monitors.memory.allocator import GIB, peak_resident
from trainer.parallel.warmup import wait


class Clock:
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


class Ticks(Callback):
    """Ends Echelon's run after some steps."""

    def __init__(self, tick: Callable[[], None], steps: int) -> None:
        self.tick, self.steps = tick, steps

    def on_step_end(self, trainer: Any) -> None:
        self.tick()
        if trainer.step == self.steps:
            raise Over
