"""A recipe of square layers, and trainers that write and check next to nothing, for benches of what is around them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainer.callback import Callback
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.process.environment import Place
from trainer.trainer import Trainer


class Chain(nn.Module):
    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Squares:
    def __init__(self, width: int, depth: int, tokens: int = 1, samples: int = 64) -> None:
        self.width, self.depth, self.shape = width, depth, (samples, tokens, width)

    def model(self) -> nn.Module:
        return Chain(nn.Sequential(nn.Linear(self.width, self.width), nn.GELU()) for _ in range(self.depth))

    def data(self, split: str) -> TensorDataset | None:
        x = torch.randn(self.shape, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x) if split == "train" else None

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return model(batch[0]).square().mean()


def quiet(
    recipe: Any, callbacks: Mapping[str, Callback], place: Place, folder: Path | str, batch: int, steps: int = 10**6,
    accumulate: int | None = None, micro_batch: int | None = None, **options: Any,
) -> Trainer:  # fmt: skip
    """Return a trainer that logs, validates and saves as little as it can, in `folder`."""
    return Trainer(
        recipe, callbacks, batch=batch, accumulate=accumulate, micro_batch=micro_batch, place=place,
        data=DataOptions(workers=0),
        options=Options(
            max_steps=steps, accelerator="cpu", log_every_steps=10**6, check_replicas_every=10**6,
            validate_every=None, run_dir=f"{folder}/run",
            checkpoint=CheckpointOptions(f"{folder}/ckpt", every_steps=None, every_minutes=None), **options,
        ),
    )  # fmt: skip
