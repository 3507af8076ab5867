"""PipeDream-2BW against a loop on one process that has both versions of the weights in full."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import default_collate
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.nan_guard import NanGuard
from trainer.callbacks.pipeline import PipelineParallel
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError
from trainer.forward_backward import weigh_loss
from trainer.process.environment import Place
from trainer.trainer import Trainer

STEPS = 6
THREE = {"stages": 3}


class Naive(Callback):
    """W(t+1) = W(t) - step(gradient of batch t-1 at W(t-1)). Two replicas are two ranks."""

    def __init__(self) -> None:
        self.before: tuple[Any, ...] = ()

    def wrap_forward_backward(self, trainer, run: Callable[..., Any]) -> Any:
        def passes(data: Any, total: Callable[[], int]) -> list[Tensor]:
            if trainer.rehearsing:
                return run(data, total)
            loss = trainer.precision.cast(trainer.recipe.loss)
            batches = list(data)
            with torch.no_grad():
                losses = [loss(trainer.module, batch) for batch, _ in batches]
            if self.before:
                old, earlier, items = self.before
                for batch, weight in earlier:
                    weigh_loss(loss(old, batch), weight * trainer.world, items).backward()
                for p, other in zip(trainer.module.parameters(), old.parameters(), strict=True):
                    p.grad = other.grad
                    if trainer.world > 1:
                        dist.all_reduce(p.grad)
                        p.grad /= trainer.world
            self.before = deepcopy(trainer.module), batches, total()
            self.before[0].zero_grad()
            return losses

        return passes


class Losses(Callback):
    """Keeps the losses of all micro-batches, and the norms."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, trainer) -> None:
        self.seen += [loss.item() for loss in trainer.losses]
        self.seen.append(trainer.grad_norm.item())


def train(place: Place, knobs: dict[str, Any] | None, run: dict[str, Any] | None = None) -> dict[str, Any]:
    run = {"batch": 12, "accumulate": 6, "dropout": 0.0, "steps": STEPS, "resume": None, "clip": 0.05, **(run or {})}
    losses = Losses()
    first = PipelineParallel(**{"schedule": "pipedream_2bw", **knobs}) if knobs is not None else Naive()
    trainer = Trainer(
        run.get("recipe", Toy)(samples=48, depth=6, dropout=run["dropout"]),
        {
            "pipeline" if knobs is not None else "naive": first,
            **{name: make() for name, make in run.get("others", {}).items()},
            "losses": losses,
        },
        run.get("optimizer", adamw),
        batch=run["batch"],
        accumulate=run["accumulate"],
        options=Options(
            max_steps=run["steps"], log_every_steps=run.get("log", 1), clip_norm=run["clip"], timeout_s=20.0,
            resume=run["resume"], precision=run.get("precision", "fp32"), validate_every=run.get("validate"),
            checkpoint=CheckpointOptions(every_steps=3, keep=5),
        ),
        data=DataOptions(workers=0),
        place=place,
    )  # fmt: skip
    trainer.fit()
    own = {name: p.detach().numpy() for name, p in trainer.module.named_parameters() if p.requires_grad}
    return {
        "weights": own,
        "losses": losses.seen,
        "validation": trainer.validation,
        "saved": str(trainer.checkpoint),
    }


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


def momentum(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def whole(ranks: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {name: value for rank in ranks for name, value in rank["weights"].items()}


def same_bits(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    found = whole(ranks)
    assert found.keys() == alone["weights"].keys()
    for rank in ranks:
        assert rank["losses"] == alone["losses"]
        assert rank["validation"] == alone["validation"]
    for name, value in alone["weights"].items():
        assert (found[name] == value).all(), name


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("stages", "cut", "run"),
    [
        (2, "auto", {"accumulate": 2}),
        (3, [1, 5], {}),
        (3, [2, 3], {"clip": None, "optimizer": momentum}),
        (4, [1, 2, 5], {"accumulate": 4}),
        (3, "auto", {"precision": "bf16"}),
    ],
)
def test_weights_and_losses_are_those_of_a_naive_loop(here, stages, cut, run):
    (alone,) = run_ranks(1, train, None, run)
    same_bits(run_ranks(stages, train, {"stages": stages, "cut": cut}, run), alone)
