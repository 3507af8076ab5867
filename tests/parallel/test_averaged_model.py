"""A copy follows the weights by the share that it is told, and has the buffers as they are."""

import torch
from torch import nn

from trainer.parallel.averaged_model import AveragedModel
from trainer.parallel.strategy import SingleDevice


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
