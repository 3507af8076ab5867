"""A hidden state that a recipe carries from batch to batch: a rehearsal leaves it alone, and a resume names it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn

from trainer.config.options import DataOptions, Options
from trainer.loggers.metrics_file import MetricsFile
from trainer.parallel.attributes import SMALL, tensors_kept
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")


class Windows:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return ({"x": part, "y": part.cumsum(1)} for part in self.x.split(10, 1))


class Carries:
    """Truncated backpropagation through time, and a loss that takes the target out of the batch."""

    def __init__(self) -> None:
        self.hidden: Any = None

    def model(self) -> nn.Module:
        return nn.GRU(1, 4, batch_first=True)

    def data(self, split: str) -> Any:
        from torch import distributed as dist

        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        x = torch.randn(4, 40, 1, generator=torch.Generator().manual_seed(0))
        return Windows(x[rank * 4 // world : (rank + 1) * 4 // world]) if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        target = batch.pop("y")
        out, hidden = model(batch["x"], self.hidden)
        self.hidden = hidden.detach()
        return nn.functional.mse_loss(out.sum(-1, keepdim=True), target)


def train(place: Place | None = None, steps: int = 6, **options: Any) -> list[float]:
    own = Options(**{"max_steps": steps, "log_every_steps": 1, "run_dir": "runs/r", "timeout_s": 60.0, **options})
    Trainer(Carries(), [MetricsFile()], batch=4, options=own, place=place, data=DataOptions(workers=0)).fit()
    return losses()


def losses() -> list[float]:
    return [json.loads(line)["train/loss"] for line in Path("runs/r/metrics.jsonl").read_text().splitlines()]


def test_ranks_begin_with_the_state_before_the_rehearsal(tmp_path, monkeypatch):
    one = train()
    (tmp_path / "two").mkdir()
    monkeypatch.chdir(tmp_path / "two")
    assert run_ranks(2, train)[0] == pytest.approx(one, rel=1e-6)


def test_a_resume_names_the_state_that_no_checkpoint_has(capsys):
    train(steps=3)
    assert "recipe.hidden" not in capsys.readouterr().out
    train(steps=6, resume="auto")
    assert "warning: resume: recipe.hidden changes in a step, and checkpoints have " in capsys.readouterr().out


def test_tensors_that_passes_change_are_put_back_and_counters_are_not():
    tensor, large = torch.zeros(2), [torch.zeros(1)] * (SMALL + 1)
    own: dict[str, Any] = {"a": tensor, "b": None, "c": (tensor,), "d": {"e": tensor}, "large": large, "calls": 0}
    before = dict(own)
    with tensors_kept([own]):
        own["a"].add_(1)
        own.update(b=torch.ones(1), c=(torch.ones(1), tensor), d={}, calls=1, new=torch.ones(1))
    assert tensor.tolist() == [0, 0]
    assert all(own[name] is before[name] for name in ("a", "b", "c", "d", "large"))
    assert own["calls"] == 1 and "new" not in own
