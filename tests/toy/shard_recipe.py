"""The network of toy_recipe on tar shards, and what may happen to one of them between the start and the first read."""

import os
import threading
from pathlib import Path
from typing import Any

import torch
from numpy.random import Generator
from torch import Tensor, nn
from toy_recipe import Points, Toy

from trainer.data.shards.writer import write_shards


class Tars(Toy):
    """`trouble`: `fifo` in the place of one shard before any is read, or `away` for 3 s while they are."""

    def __init__(
        self, shards: str, trouble: str = "", samples: int = 96, width: int = 16, depth: int = 2,
        dropout: float = 0.0, dtype: str = "float32",
    ) -> None:  # fmt: skip
        super().__init__(samples, width, depth, dropout, dtype)
        self.shards, self.trouble = shards, trouble
        self.path = Path(shards.replace("*", "000003"))

    def data(self, split: str) -> Any:
        return self.shards if split == "train" else None

    def transform(self, sample: Any, rng: Generator) -> dict[str, Tensor]:
        if self.trouble == "away":
            self.trouble = ""
            threading.Timer(3.0, self.put_aside().rename, [self.path]).start()
        return {key: torch.as_tensor(sample[f"{key}.npy"]) for key in ("x", "y", "mask")}

    def model(self) -> nn.Module:
        if self.trouble == "fifo":
            self.put_aside()
            os.mkfifo(self.path)
        return super().model()

    def put_aside(self) -> Path:
        return self.path.rename(self.path.with_name("aside"))


def write_points(folder: Path, size: int = 96, per_shard: int = 8, dtype: torch.dtype = torch.float32) -> list[Path]:
    points = Points(size, dtype)
    samples = ({"__key__": f"{i:03d}"} | {f"{k}.npy": v.numpy() for k, v in points[i].items()} for i in range(size))
    return write_shards(samples, folder, "p", per_shard)
