"""Runs whose state may lie in rows on the ranks: what they end with, gathered and whole."""

from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from toy_recipe import Toy

from support.ranks import groups_left
from support.runs import sgd
from trainer.callback import Callback
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.optim.factories import adamw
from trainer.process.environment import Place
from trainer.trainer import Trainer


def whole(value: Any) -> Any:
    """A collective if the value is a sharded tensor."""
    value = value.detach() if isinstance(value, Tensor) else value
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def flat(model: nn.Module, buffers: bool = True) -> np.ndarray:
    """All parameters of a model, then its buffers, in one array of float64."""
    tensors = [*map(whole, model.parameters()), *(model.buffers() if buffers else ())]
    return np.concatenate([tensor.double().numpy().ravel().copy() for tensor in tensors])


def adam(groups: Any) -> torch.optim.Optimizer:
    return adamw(groups, lr=0.01)


@dataclass
class Case:
    callbacks: dict[str, Callback] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    recipe: Any = field(default_factory=lambda: Toy(width=17, depth=3))
    optimizer: Any = sgd
    steps: int = 5
    batch: int = 24
    accumulate: int = 2
    run: str = "run"


class End(Callback):
    """Keeps what is whole only while the ranks are together."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_step_end(self, trainer) -> None:
        self.losses.append(trainer.metrics["train/loss"])
        self.norms.append(trainer.metrics.get("train/grad_norm", 0.0))

    def on_fit_end(self, trainer) -> None:
        if trainer.step:  # else the run was refused
            trainer.emit("on_flush")
            # Rank 0's buffers are those that the others take.
            self.weights, self.validated = flat(trainer.module, trainer.rank == 0), flat(trainer.eval_model)


def fit(place: Place, cases: list[Case]) -> list[dict[str, Any]]:
    """What each case ends with, or the message that refuses it. `left`: threads of process groups after all."""
    found = [run(replace(place, store=f"{place.store}-{i}"), case) for i, case in enumerate(cases)]
    return [{**each, "left": groups_left()} for each in found]


def run(place: Place, case: Case) -> dict[str, Any]:
    options = {
        "clip_norm": 0.3, "log_every_steps": 1, "validate_every": 2, "check_replicas_every": 1, "timeout_s": 30.0,
        "run_dir": f"runs/{case.run}", **case.options,
    }  # fmt: skip
    end = End()
    try:
        trainer = Trainer(
            case.recipe, {**deepcopy(case.callbacks), "end": end}, case.optimizer, batch=case.batch,
            accumulate=case.accumulate, data=DataOptions(workers=0),
            options=Options(max_steps=case.steps, checkpoint=CheckpointOptions(every_steps=3, keep=9), **options),
            place=place,
        )  # fmt: skip
        trainer.fit()
    except Exception as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"validation": trainer.validation, **vars(end)}
