"""Real weights of samples, as docs/datasets.md has them: the gradient is the weighted mean over all ranks."""

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer.config.options import DataOptions, Options
from trainer.process.environment import Place
from trainer.trainer import Trainer


class Rows(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x = torch.tensor([i / 12], dtype=torch.float64)
        return {"x": x, "y": torch.sin(x), "w": 0.1 + 3 * x[0]}


class Weighted:
    def model(self) -> nn.Module:
        return nn.Linear(1, 1).double()

    def data(self, split: str) -> Dataset | None:
        return Rows() if split == "train" else None

    def weight(self, batch: dict[str, Tensor]) -> int:
        return round(1e6 * batch["w"].sum().item())

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        error = (model(batch["x"]) - batch["y"]).square().mean(dim=1)
        return (error * batch["w"]).sum() / batch["w"].sum()


def sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def train(place: Place) -> list[list[float]]:
    options = Options(max_steps=1, run_dir="runs/r")
    trainer = Trainer(
        Weighted(), None, sgd, batch=12, micro_batch=2, options=options, data=DataOptions(workers=0), place=place
    )
    first = [p.detach().flatten().tolist() for p in trainer.module.parameters()]
    trainer.fit()
    return [*first, *(p.detach().flatten().tolist() for p in trainer.module.parameters())]


@pytest.mark.parametrize("world", [1, 3])
def test_the_gradient_is_the_weighted_mean_over_all_ranks(world, tmp_path):
    """By hand: the gradient of a weighted mean of squares."""
    rows = [Rows()[i] for i in range(12)]
    x, y, w = (np.array([float(row[name]) for row in rows]) for name in ("x", "y", "w"))
    for (a,), (b,), (new_a,), (new_b,) in run_ranks(world, train):
        slope, offset = (2 * ((a * x + b - y) * part * w).sum() / w.sum() for part in (x, 1.0))
        assert (new_a, new_b) == pytest.approx((a - 0.5 * slope, b - 0.5 * offset), abs=1e-6)
