"""Times eager steps of Echelon and of a bare loop, in turns in one process, on the same random tokens."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from scripts.bench import trainers
from scripts.bench.harness import median_ratio
from scripts.bench.one_gpu.cells import Cell
from scripts.bench.one_gpu.recipe import RandomText
from scripts.bench.overhead.steps import mean_of
from scripts.bench.overhead.turns import Task, Train, measure
from scripts.bench.trainers import Batch, Job
from trainer.optim.factories import adamw

ROUNDS, WARM = 3, 10  # 40 steps of each round are timed
BASE = "bare loop"
LOOPS: dict[str, Train] = {BASE: trainers.bare, f"{BASE}, again": trainers.bare, "Echelon": trainers.echelon}


class Given(RandomText):
    """Trains on the batches of a turn."""

    def __init__(self, cell: Cell, batches: Iterable[Batch]) -> None:
        super().__init__(cell)
        self.batches = batches

    def data(self, split: str) -> Any:
        return self.batches if split == "train" else None


@dataclass(frozen=True, kw_only=True)
class RandomTask(Task):
    cell: Cell

    def job(self, batches: Iterable[Batch], steps: int, folder: Path) -> Job:
        recipe = Given(self.cell, batches)
        return Job(
            recipe, lambda: batches, self.samples, steps, folder, self.optimizer, self.device,
            precision=self.cell.precision,
        )  # fmt: skip


def time_turns(cell: Cell, device: torch.device, folder: Path) -> dict[str, float]:
    recipe = RandomText(cell)

    def batch() -> Batch:
        rows = torch.randint(len(recipe.corpus), (cell.micro,)).tolist()
        return default_collate([recipe.corpus[i] for i in rows])

    task = RandomTask(recipe.model, batch, cell.micro, partial(adamw, lr=1e-4), device, cell=cell)
    found = measure(LOOPS, task, ROUNDS, WARM)
    base, own = mean_of(found, BASE, "us"), found.values("Echelon", "us")
    return {
        "bare loop, ms a step": found.median(BASE, "us") / 1000,
        "Echelon, ms a step": found.median("Echelon", "us") / 1000,
        "ratio": median_ratio(own, base),
        "noise": median_ratio(found.values(BASE, "us"), base),
    }
