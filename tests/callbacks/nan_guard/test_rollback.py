"""The state that a step changes: all of it is copied and put back, in memory of its own."""

import pytest
import torch
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.nan_guard.callback import NanGuard
from trainer.config.options import DataOptions, Options
from trainer.optim.factories import adamw, lamb
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")


@pytest.mark.parametrize("optimizer", [lamb, adamw])
def test_rollback_takes_back_steps_that_are_plain_numbers(optimizer):
    """LAMB and bitsandbytes count so. Six steps, of which the third and the fourth are undone."""
    recipe = OneIsNaN()
    recipe.trainer = Trainer(
        recipe, {"guard": NanGuard("rollback", every=2)}, optimizer, batch=12, place=Place(),
        data=DataOptions(workers=0, shuffle_shards=5, shuffle_window=4), options=Options(max_steps=6, run_dir="runs/r"),
    )  # fmt: skip
    recipe.trainer.fit()
    assert {float(state["step"]) for state in recipe.trainer.optimizer.state.values()} == {4.0}


class Running(nn.Module):
    """Centres its input by a running mean that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


class OneIsNaN(Toy):
    """In the step after the third, as it would be in the data: in the mean and in the loss."""

    trainer: Trainer

    def model(self) -> nn.Module:
        return nn.Sequential(Running(), super().model())

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"] * (float("nan") if model.training and self.trainer.step == 3 else 1.0)
        return super().loss(model, batch | {"x": x})


def test_rollback_takes_back_what_no_checkpoint_has():
    recipe, means = OneIsNaN(), dict[int, Tensor]()

    class After(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            means[trainer.step] = next(trainer.module.buffers()).clone()

    recipe.trainer = Trainer(
        recipe, {"guard": NanGuard("rollback", every=2), "z": After()}, batch=12, place=Place(),
        data=DataOptions(workers=0, shuffle_shards=5, shuffle_window=4), options=Options(max_steps=6, run_dir="runs/r"),
    )  # fmt: skip
    recipe.trainer.fit()
    assert torch.equal(means[4], means[2]) and not torch.equal(means[3], means[2])
    assert torch.isfinite(means[6]).all() and not torch.equal(means[6], means[4])
