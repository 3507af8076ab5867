"""One device: gradients clipped to a norm by hand, and a model that is moved unless it has no memory yet."""

import math

import pytest
import torch
from torch import nn

from trainer.errors import DataError
from trainer.parallel.strategy import SingleDevice, clip_gradients, clip_values, to_device, trained, zero_loss


def model() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1))
    net[1].bias.requires_grad_(False)
    return net


@pytest.mark.parametrize(("most", "factor"), [(None, 1.0), (26.0, 1.0), (6.5, 0.5)])
def test_gradients_are_clipped_by_their_norm_over_all_parameters(most, factor):
    """The norm that is returned is the one before, also where nothing is clipped."""
    one = SingleDevice(model())
    assert [p.shape for p in one.parameters] == [(2, 1), (1, 2)]
    for p, values in zip(one.parameters, ([[3.0], [4.0]], [[0.0, 12.0]]), strict=True):
        p.grad = torch.tensor(values)
    assert one.clip(most) == 13.0 == math.hypot(3, 4, 12)
    found = torch.cat([p.grad.flatten() for p in one.parameters if p.grad is not None])
    torch.testing.assert_close(found, factor * torch.tensor([3.0, 4.0, 0.0, 12.0]), rtol=1e-6, atol=0)


def test_without_a_gradient_the_norm_is_zero():
    assert clip_gradients(trained(model()), None) == 0.0


def test_each_element_is_clipped_and_no_gradient_is_none():
    parameters = trained(model())
    clip_values(parameters, 0.5)
    parameters[0].grad = torch.tensor([[3.0], [-0.25]])
    clip_values(parameters, 0.5)
    assert parameters[0].grad.tolist() == [[0.5], [-0.25]]


def test_a_model_on_the_meta_device_stays_there():
    with torch.device("meta"):
        empty = model()
    assert to_device(empty, torch.device("cpu")) is empty and empty[0].weight.is_meta
    assert to_device(model(), torch.device("meta"))[0].weight.is_meta


def test_the_reduction_is_only_noted():
    one = SingleDevice(model())
    assert one.syncing and one.buckets() == []
    one.sync_gradients(False)
    assert not one.syncing


def test_a_loss_of_no_items_is_zero_and_has_a_gradient_for_every_parameter():
    parameters = [nn.Parameter(torch.full((2,), 3.0)), nn.Parameter(torch.ones(1, dtype=torch.float64))]
    loss = zero_loss(parameters, unused=False)
    loss.backward()
    assert loss == 0.0 and all(p.grad is not None and not p.grad.any() for p in parameters)
    with pytest.raises(
        DataError, match=r"^trainer.ddp.find_unused_parameters=true: a micro-batch has weight 0, .*=false, or"
    ):
        zero_loss(parameters, unused=True)
