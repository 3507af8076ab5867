"""Short runs of the toy that save and resume, in the current folder."""

from typing import Any

import torch
from toy_recipe import Toy

from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.process.environment import Place
from trainer.trainer import Trainer


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.5)


def make(
    recipe: Any = None,
    callbacks: Any = None,
    optimizer: Any = sgd,
    batch: int = 12,
    shuffle_shards: int = 5,
    place: Place | None = None,
    schedule: Any = None,
    **options: Any,
):
    checkpoint = CheckpointOptions(**{"every_steps": 2, **options.pop("checkpoint", {})})
    return Trainer(
        recipe or Toy(),
        callbacks or {},
        optimizer,
        schedule,
        batch=batch,
        options=Options(**{"max_steps": 4, "run_dir": "runs/r", "checkpoint": checkpoint, **options}),
        data=DataOptions(workers=0, shuffle_shards=shuffle_shards, shuffle_window=4),
        place=place or Place(),
    )
