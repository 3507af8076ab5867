"""Runs in stages and in one piece: the weights that each rank has, the losses, and what is saved."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.pipeline import PipelineParallel
from trainer.checkpoint.serialize import optimizer_state
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.optim.groups import WithGroups
from trainer.process.environment import Place
from trainer.trainer import Trainer

STEPS = 3


class Losses(Callback):
    """Keeps the losses of all micro-batches, and the norms."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, trainer) -> None:
        self.seen += [loss.item() for loss in trainer.losses]
        self.seen.append(trainer.grad_norm.item())


class Fails(Toy):
    """The loss breaks in a later step."""

    calls = 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        self.calls += 1
        if self.calls > 30:
            raise ValueError("broken on purpose")
        return loss


def train(place: Place, knobs: dict[str, Any] | None, run: dict[str, Any] | None = None) -> dict[str, Any]:
    run = {
        "width": 16,
        "depth": 6,
        "batch": 12,
        "accumulate": 6,
        "dropout": 0.0,
        "steps": STEPS,
        "resume": None,
        **(run or {}),
    }
    losses = Losses()
    pipeline = {"pipeline": PipelineParallel(**knobs)} if knobs is not None else {}
    recipe = run.get("recipe", Toy)(samples=48, width=run["width"], depth=run["depth"], dropout=run["dropout"])
    trainer = Trainer(
        recipe,
        {**pipeline, **{name: make() for name, make in run.get("others", {}).items()}, "losses": losses},
        WithGroups(partial(torch.optim.AdamW, lr=0.01), run.get("groups", [])),
        batch=run["batch"],
        accumulate=run["accumulate"],
        options=Options(
            max_steps=run["steps"], log_every_steps=1, clip_norm=0.05, timeout_s=20.0, resume=run["resume"],
            init_from=run.get("init_from"), precision=run.get("precision", "fp32"),
            checkpoint=CheckpointOptions(every_steps=3),
        ),
        data=DataOptions(workers=0),
        place=place,
    )  # fmt: skip
    trainer.fit()
    own = {name: p.detach().numpy() for name, p in trainer.module.named_parameters() if p.requires_grad}
    assert len(own) < sum(1 for _ in trainer.module.parameters()) or knobs is None
    averages = {name: p.detach().numpy() for name, p in trainer.eval_model.named_parameters()}
    states = optimizer_state(trainer.optimizer, trainer.module).items()
    starts = trainer.callbacks["pipeline"].decisions()["starts"] if pipeline else []
    return {
        "weights": own,
        "averages": {name: value for name, value in averages.items() if not np.isnan(value).any()},
        "state_bytes": sum(value.nbytes for _, state in states for value in state.values()),
        "states": [name for name, state in states if state],
        "losses": losses.seen,
        "validation": trainer.validation,
        "saved": str(trainer.checkpoint),
        "starts": starts,
    }


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
