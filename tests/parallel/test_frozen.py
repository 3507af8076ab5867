"""Parameters that a callback freezes or unfreezes: a bare loop's weights, or a refusal by name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainer.callback import Callback
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError
from trainer.trainer import Trainer


class Net:
    """Two layers on one batch, the first of which is frozen at the start."""

    def __init__(self, held: bool) -> None:
        self.held = held

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        model[0].requires_grad_(False)
        return model

    def data(self, split: str) -> Any:
        return TensorDataset(torch.tensor([[1.0, 2.0]] * 8)) if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - 1).square().mean()

    def parameter_groups(self, model: Any) -> list[dict[str, Any]]:
        return [{"params": list(model[0].parameters()), "held": True}] if self.held else []


class Unfreezes(Callback):
    def on_step_end(self, trainer) -> None:
        trainer.module[0].requires_grad_(trainer.step >= 3)  # pyright: ignore[reportIndexIssue] a Sequential
        if trainer.step == 5:
            trainer.optimizer.param_groups[0]["lr"] = 0.05


def trained(held: bool, **clip: Any) -> Trainer:
    def sgd(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    options = Options(max_steps=8, validate_every=None, log_every_steps=1, **clip)
    trainer = Trainer(Net(held), [Unfreezes()], sgd, batch=4, options=options, data=DataOptions(workers=0))
    trainer.fit()
    return trainer


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.1}])
def test_held_parameters_train_once_they_are_unfrozen(clip, tmp_path):
    """A rate that is set by hand stays, too."""
    ours = trained(True, **clip).module
    recipe: Any = Net(True)
    model = recipe.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(1, 9):
        recipe.loss(model, [torch.tensor([[1.0, 2.0]] * 4)]).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        model[0].requires_grad_(step >= 3)
        if step == 5:
            ours_has_two_groups = [p for p in model.parameters() if p.dim() == 2][1:]
            rest = [p for p in model.parameters() if all(p is not own for own in ours_has_two_groups)]
            optimizer.param_groups[0]["params"] = ours_has_two_groups
            optimizer.add_param_group({"params": rest, "lr": 0.1})
            optimizer.param_groups[0]["lr"] = 0.05
    for own, bare in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, bare)


def test_parameters_that_the_optimizer_lacks_are_named(tmp_path):
    words = (
        r"^0\.weight: was unfrozen during the run, .*step 4, and the optimizer has no frozen parameters; give recipe"
    )
    with pytest.raises(ConfigError, match=words):
        trained(False)
