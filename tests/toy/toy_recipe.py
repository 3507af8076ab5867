"""A network of a few layers on synthetic data, for tests: what a user's own recipe looks like."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Points(Dataset):
    """Synthetic: x uniform from the sample's number, y a smooth function of it; 1 to 4 of the outputs count."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.size, self.dtype = size, dtype

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(i)
        x = torch.rand(8, generator=generator, dtype=self.dtype)
        mask = torch.arange(4) <= i % 4
        return {"x": x, "y": torch.sin(3 * x[:4]), "mask": mask.to(self.dtype)}


class Block(nn.Sequential):
    pass


class Toy:
    def __init__(
        self, samples: int = 96, width: int = 16, depth: int = 2, dropout: float = 0.0, dtype: str = "float32"
    ) -> None:
        self.samples, self.width, self.depth, self.dropout = samples, width, depth, dropout
        self.dtype = getattr(torch, dtype)

    def model(self) -> nn.Module:
        blocks = [
            Block(nn.Linear(self.width, self.width), nn.Tanh(), nn.Dropout(self.dropout)) for _ in range(self.depth)
        ]
        net = nn.Sequential(nn.Linear(8, self.width), nn.ModuleList(blocks), nn.Linear(self.width, 4))
        return Net(net[0], net[1], net[2]).to(self.dtype)

    def data(self, split: str) -> Dataset:
        return Points(self.samples if split == "train" else 13, self.dtype)

    def weight(self, batch: dict[str, Tensor]) -> int:
        return int(batch["mask"].sum())

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        error = (model(batch["x"]) - batch["y"]).square() * batch["mask"]
        return error.sum() / batch["mask"].sum()


class Net(nn.Module):
    def __init__(self, first: nn.Module, blocks: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, blocks, last

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:  # pyright: ignore[reportGeneralTypeIssues] a ModuleList
            x = x + block(x)
        return self.last(x)


def plain_sgd(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr)
