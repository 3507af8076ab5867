"""The loop, without a trainer: its steps are those of a bare loop, bit for bit, and a new one resumes it."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from support.runs import sgd
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.context import Command, RunArguments
from trainer.loop import Loop
from trainer.process.environment import Place
from trainer.setup import build, open_run

pytestmark = pytest.mark.usefixtures("tmp_path")
BATCHES = list(torch.rand(6, 2, 4, 3, generator=torch.Generator().manual_seed(1)))


class Batches:
    def __iter__(self) -> Iterator[Tensor]:
        return iter(BATCHES)


class Linear:
    def model(self) -> nn.Module:
        return nn.Linear(3, 3)

    def data(self, split: str) -> Any:
        return Batches() if split == "train" else None

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return mse_loss(model(batch[0]), batch[1])


def fit(steps: int, run: str, resume: str | None = None) -> Loop:
    options = Options(
        max_steps=steps, run_dir=f"runs/{run}", resume=resume, clip_norm=0.1,
        checkpoint=CheckpointOptions(every_steps=2),
    )  # fmt: skip
    data, command = DataOptions(workers=0), Command()
    job = RunArguments(Linear(), {}, sgd, None, 2, None, None, options, data, Place(), "run", command)
    with ExitStack() as refused:
        context, plan = open_run(job, refused)
        loop = Loop(context, build(context, plan, sgd))
        refused.pop_all()
    loop.fit()
    return loop


def bare(steps: int) -> nn.Module:
    torch.manual_seed(0)
    recipe = Linear()
    model = recipe.model()
    optimizer = sgd(model.parameters())
    for batch in BATCHES[:steps]:
        recipe.loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_the_steps_are_those_of_a_bare_loop_and_a_new_loop_resumes_them():
    first = fit(3, "r")
    again = fit(5, "r", resume="ckpt/r")
    assert (first.state.step, first.state.samples, again.state.loaded, again.state.step) == (3, 6, (3, -1), 5)
    for loop, steps in ((first, 3), (again, 5)):
        for ours, plain in zip(loop.context.module.parameters(), bare(steps).parameters(), strict=True):
            assert torch.equal(ours, plain)
