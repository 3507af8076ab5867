"""The parts of a run, built without a trainer."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import refuses
from support.runs import sgd
from torch import nn
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.config.options import DataOptions, Options
from trainer.context import Command, RunArguments
from trainer.errors import ConfigError
from trainer.process.environment import Place
from trainer.setup import build, open_run

pytestmark = pytest.mark.usefixtures("tmp_path")


def job(recipe: Any, callbacks: dict[str, Callback] | None = None, **options: Any) -> RunArguments:
    return RunArguments(
        recipe, callbacks or {}, sgd, None, 12, None, None, Options(max_steps=2, run_dir="runs/r", **options),
        DataOptions(workers=0), Place(), "run", Command(),
    )  # fmt: skip


class Stops(Toy):
    def model(self) -> nn.Module:
        raise ConfigError("recipe.model(): refused")


def test_the_parts_are_built_in_the_order_of_docs_step():
    order: list[str] = []

    class Notes(Callback):
        def build_model(self, trainer, build: Any) -> nn.Module:
            order.append(f"build_model {hasattr(trainer, 'module')}")
            return build()

        def wrap_model(self, trainer, model: nn.Module) -> nn.Module:
            order.append(f"wrap_model {hasattr(trainer, 'strategy')}")
            return model

        def wrap_optimizer(self, trainer, optimizer: Any) -> Any:
            order.append(f"wrap_optimizer {trainer.parameters == list(trainer.module.parameters())}")
            return optimizer

        def wrap_forward_backward(self, trainer, run: Any) -> Any:
            order.append(f"wrap_forward_backward {hasattr(trainer, 'loader')}")
            return run

    with ExitStack() as refused:
        context, plan = open_run(job(Toy(), {"notes": Notes()}), refused)
        parts = build(context, plan, sgd)
        assert order == [
            "build_model False", "wrap_model False", "wrap_optimizer True", "wrap_forward_backward False",
        ]  # fmt: skip
        assert parts.checkpointer.parts.keys() == {"interval", "scaler", "quarantine", "rates", "group_settings"}
        assert context.eval_model is context.global_model is context.module


def test_a_refused_run_leaves_no_folder_and_lets_another_one_write_it():
    for _ in range(2):
        with refuses("recipe.model()", "refused"), ExitStack() as refused:
            build(*open_run(job(Stops()), refused), sgd)
    assert not os.listdir() or not list(Path("runs").glob("*"))


def test_gradients_are_views_of_buckets_on_a_gpu():
    """A model would be on it next."""
    for device, view in (("cuda", True), ("cpu", False)):
        with refuses("recipe.model()", "refused"), ExitStack() as refused:
            context, plan = open_run(job(Stops()), refused)
            context.device = torch.device(device)
            try:
                build(context, plan, sgd)
            finally:
                context.device = torch.device("cpu")
                assert context.ddp["gradient_as_bucket_view"] is view
