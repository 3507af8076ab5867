"""A data set that draws from a generator of its own: one seed of each sample, whatever the workers and the stops."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from trainer.config.options import DataOptions, Options
from trainer.data.own_generators import generators_in, seed_each
from trainer.loggers.metrics_file import MetricsFile
from trainer.trainer import Trainer


class Jitter:
    """Has its generator as a class attribute, as MONAI's Randomizable does."""

    R = np.random.RandomState()

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.R.normal()


class Noisy(Dataset[Any]):
    def __init__(self) -> None:
        self.generator, self.transforms = np.random.default_rng(0), [Jitter()]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Tensor:
        x = torch.full((1,), i / 24) + self.generator.normal()
        for transform in self.transforms:
            x = transform(x)
        return x.float()


class Recipe:
    def __init__(self) -> None:
        self.seen: list[float] = []

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self, split: str) -> Any:
        return Subset(Noisy(), range(20)) if split == "train" else None

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.seen += batch.flatten().tolist()
        return model(batch).square().mean()


def train(run: str, workers: int = 0, steps: int = 6, **options: Any) -> tuple[list[float], list[float]]:
    recipe = Recipe()
    own = Options(max_steps=steps, log_every_steps=1, run_dir=f"runs/{run}", **options)
    Trainer(recipe, [MetricsFile()], batch=8, options=own, data=DataOptions(workers=workers)).fit()
    lines = Path(f"runs/{run}/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["train/loss"] for line in lines], recipe.seen


def test_a_resume_and_workers_draw_the_same_numbers(tmp_path):
    losses, seen = train("whole")
    assert len(set(seen)) == len(seen) == 48  # also those of a sample in two epochs
    assert train("workers", workers=2) == (losses, seen)
    train("cut", steps=3)
    assert train("cut", resume="auto")[0] == losses


@pytest.mark.parametrize(
    "make", [np.random.RandomState, np.random.default_rng, random.Random, torch.Generator, lambda: Jitter.R]
)
def test_each_kind_of_generator_repeats_its_numbers(make):
    def draw() -> float:
        if isinstance(generator, torch.Generator):
            return float(torch.rand((), generator=generator))
        return generator.random()

    generator = make()
    owner = type("Owner", (), {})()
    owner.parts = {"inner": [generator, generator], "samples": list(range(1000))}
    assert generators_in(owner) == [generator]
    seed_each([generator], 7)
    first = draw()
    assert draw() != first
    seed_each([generator], 7)
    assert draw() == first
