"""Times synthetic images (3, S, S) of uint8 on their way from tar shards, or from a memory map, to the device."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from scripts.bench import trainers
from scripts.bench.one_gpu.cells import TINY, Cell
from scripts.bench.one_gpu.clock import Clock, Ticks
from scripts.bench.trainers import Job
from trainer.data.shards.writer import write_shards
from trainer.optim.factories import sgd

WORKERS, SHARDS = 8, 16


class Brightness(nn.Module):
    """One weight, so that the step is all loading."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        return self.scale * images.float().mean()


class Images:
    def __init__(self, shards: list[str]) -> None:
        self.shards = shards

    def model(self) -> nn.Module:
        return Brightness()

    def data(self, split: str) -> list[str] | None:
        return self.shards if split == "train" else None

    def transform(self, sample: dict[str, Any], rng: Generator) -> dict[str, Any]:
        return {"x": sample["npy"]}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"])


class Mapped(Dataset[dict[str, Tensor]]):
    """The same images in one file of NumPy's."""

    def __init__(self, file: Path) -> None:
        self.images = np.load(file, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": torch.from_numpy(np.array(self.images[i]))}


def time_images(cell: Cell, device: torch.device, folder: Path) -> dict[str, float]:
    """Train on the images with workers and pinned memory; each epoch has 8 batches."""
    small, count = cell.size == TINY, 8 * cell.micro
    side, workers = (16, 1) if small else (224, WORKERS)
    images = np.random.default_rng(0).integers(0, 256, (count, 3, side, side), np.uint8)
    clock = Clock(cell, device)

    def batches() -> Iterator[dict[str, Tensor]]:
        loader = DataLoader(
            Mapped(folder / "images.npy"), cell.micro, shuffle=True, num_workers=workers,
            pin_memory=device.type == "cuda", persistent_workers=True,
        )  # fmt: skip
        while True:
            yield from loader

    steps = cell.warm + cell.timed
    job = partial(
        Job, batch=cell.micro, steps=steps, folder=folder, optimizer=partial(sgd, lr=0.1), device=device,
        tick=clock.tick, workers=workers,
    )  # fmt: skip
    if cell.trainer == "Echelon":
        samples = ({"__key__": f"{i:06}", "npy": image} for i, image in enumerate(images))
        write_shards(samples, folder / "shards", "train", -(-count // SHARDS))
        shards = sorted(map(str, (folder / "shards").glob("*.tar")))
        own = job(recipe=Images(shards), batches=list, steps=100_000)
        trainers.echelon(own, {"watch": Ticks(clock.tick, steps)})
    else:
        np.save(folder / "images.npy", images)
        rows = batches()
        trainers.bare(job(recipe=Images([]), batches=lambda: (next(rows) for _ in range(steps))))
    rate = cell.micro / clock.seconds
    return {"images/s": rate, "GB/s": rate * images[0].nbytes / 1e9, "side": float(side), "workers": float(workers)}
