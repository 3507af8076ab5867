"""A copy follows the weights by the share that it is told, and has the buffers as they are."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.parallel.averaged_model import AveragedModel
from trainer.parallel.strategy import SingleDevice, to_device


def test_a_copy_moves_by_a_share_and_copies_buffers():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    nn.init.constant_(model[0].weight, 1.0)
    averaged = AveragedModel(SingleDevice(model), model)
    with torch.no_grad():
        model[0].weight.fill_(5.0)
        model[1].running_mean.fill_(3.0)
    own = averaged.module.get_parameter("0.weight")
    assert own.eq(1.0).all() and not own.requires_grad
    averaged.update(0.25)
    assert own.eq(2.0).all() and averaged.module.get_buffer("1.running_mean").eq(3.0).all()
    averaged.update(1.0)
    assert own.eq(5.0).all() and model[0].weight.requires_grad


class Assigned(nn.Module):
    """Buffers that a forward pass assigns: a new tensor, one of another shape, and one that was None."""

    mean: Tensor
    history: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("history", torch.zeros(0))
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return self.layer(x - self.mean)


def test_buffers_that_a_pass_has_assigned_are_copied():
    model = Assigned()
    averaged = AveragedModel(SingleDevice(model), model)
    for passes in range(1, 9):
        model(torch.full((4, 1), 8.0))
        averaged.update(0.1)
        assert averaged.module.get_buffer("mean").item() == 8 * (1 - 0.5**passes)
    model.history, model.late = torch.ones(3), torch.ones(2)
    averaged.update(0.1)
    assert all(map(torch.equal, averaged.module.buffers(), model.buffers())) and len(list(model.buffers())) == 3
    model.history.fill_(5.0)
    assert averaged.module.get_buffer("history").eq(1.0).all()


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm])
def test_layers_that_compute_their_weight_follow_the_average(norm):
    """The copy computes its weight from its own parameters."""
    model: Any = nn.Sequential(norm(nn.Linear(4, 8)), nn.Tanh())
    model(torch.ones(2, 4)).sum().backward()
    averaged: Any = AveragedModel(SingleDevice(model), model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)
    x = torch.ones(2, 4)
    before = averaged.module.eval()(x)
    averaged.update(1.0)
    model.eval()
    assert torch.equal(averaged.module(x), model(x)) and not torch.equal(before, model(x))


def test_an_expanded_buffer_gets_memory_of_its_own():
    model = nn.Linear(4, 4)
    model.register_buffer("grid", torch.arange(4.0).expand(3, 4))
    built = to_device(model, torch.device("cpu"))
    averaged = AveragedModel(SingleDevice(built), built)
    averaged.update(0.5)
    assert averaged.module.get_buffer("grid").tolist() == [[0.0, 1.0, 2.0, 3.0]] * 3
    built.get_buffer("grid").fill_(2.0)


def test_an_attribute_that_cant_be_copied_is_named():
    model: Any = nn.Sequential(nn.Linear(2, 2))
    model[0].outputs = [model(torch.ones(1, 2))]
    with pytest.raises(
        ConfigError, match=r"^recipe\.model\(\): 0\.outputs can't be copied for an average .* detach\(\)"
    ):
        AveragedModel(SingleDevice(model), model)
