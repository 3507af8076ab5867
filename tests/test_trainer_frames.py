"""Counts Python's frames of `trainer/` in a step: what a run does not use costs its steps nothing."""

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import trainer as package
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.loggers.metrics_file import MetricsFile
from trainer.loggers.progress import Progress
from trainer.loggers.tensorboard import TensorBoard
from trainer.monitors.advice.callback import Advice
from trainer.monitors.memory.callback import Memory
from trainer.monitors.step_timer import StepTimer
from trainer.monitors.throughput import Throughput
from trainer.optim.factories import sgd
from trainer.process.environment import Place
from trainer.trainer import Trainer

OWN = str(Path(package.__file__).parent) + "/"
FIRST, STEPS = 60, 50  # one of the counted steps is logged


def count(frames: Counter[str], frame: FrameType, event: str, _: Any) -> None:
    if event == "call" and frame.f_code.co_filename.startswith(OWN):
        frames[frame.f_code.co_qualname] += 1


class Counted:
    """Batches without end. Frames are counted from the batch `FIRST` on, for `STEPS` steps."""

    def __init__(self) -> None:
        self.frames: Counter[str] = Counter()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(4)]
        for number in itertools.count():
            if number == FIRST:
                sys.setprofile(partial(count, self.frames))
            if number == FIRST + STEPS:
                sys.setprofile(None)
            yield batches[number % 4]


class Recipe:
    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def data(self, split: str) -> Any:
        return self.batches if split == "train" else None

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])


def train(callbacks: Callable[[], list[Any]], batches: Any) -> None:
    options = Options(
        max_steps=FIRST + STEPS + 5,
        log_every_steps=50,
        checkpoint=CheckpointOptions(every_steps=10_000),
        accelerator="cpu",
    )
    Trainer(
        Recipe(batches), callbacks(), sgd, batch=32, options=options, data=DataOptions(workers=0), place=Place()
    ).fit()


def observers() -> list[Any]:
    return [StepTimer(), Throughput(), Memory(), Advice(), TensorBoard(), MetricsFile(), Progress()]


@pytest.mark.parametrize(("callbacks", "most"), [(list, 15), (observers, 25)])
def test_a_step_has_few_frames(callbacks, most, tmp_path, capsys):
    try:
        train(callbacks, batches := Counted())
    finally:
        sys.setprofile(None)
    counted = {name: count / STEPS for name, count in batches.frames.items()}
    assert 5 < sum(counted.values()) <= most, sorted(counted.items(), key=lambda item: -item[1])


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Samples by number. Frames are counted from the `FIRST` step on, for `STEPS` steps of 32 samples."""

    def __init__(self) -> None:
        self.x, self.y = torch.randn(8192, 64), torch.randint(10, (8192,))
        self.reads, self.frames = 0, Counter[str]()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.reads == 32 * FIRST:
            sys.setprofile(partial(count, self.frames))
        if self.reads == 32 * (FIRST + STEPS):
            sys.setprofile(None)
        self.reads += 1
        return self.x[index], self.y[index]


def test_a_sample_has_no_frame_but_its_own(tmp_path):
    try:
        train(list, rows := Rows())
    finally:
        sys.setprofile(None)
    each = {name: frames for name, frames in rows.frames.items() if frames > 20 * STEPS}  # others are of a step
    assert rows.reads > 32 * (FIRST + STEPS) and rows.frames and not each, each
