"""Options inside of options, objects, and functions that wait for their first argument."""

import torch
from support.messages import refuses

from trainer.config.build import build, build_options
from trainer.config.options import CheckpointOptions, DDPOptions, Options
from trainer.config.targets import LIBRARIES


def test_sections_become_dataclasses_at_every_depth():
    given = {"max_steps": 7, "ddp": {"bucket_mib": 3.0}, "checkpoint": {"keep": 4}}
    options = build_options(Options, given)
    assert options == Options(max_steps=7, ddp=DDPOptions(3.0), checkpoint=CheckpointOptions(keep=4))
    assert given["ddp"] == {"bucket_mib": 3.0}


def test_a_partial_one_still_takes_its_first_argument():
    node = {"_target_": "torch.optim.SGD", "lr": 0.25, "_partial_": True}
    weight = torch.zeros(1, requires_grad=True)
    optimizer = build("optimizer", node, LIBRARIES)([weight])
    assert type(optimizer) is torch.optim.SGD and optimizer.param_groups[0]["lr"] == 0.25
    layer = build("recipe", {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}, LIBRARIES)
    assert layer.weight.shape == (3, 2)
    with refuses("recipe._target_=torch.nn.Linear", "'trainer.allow_targets=[recipes,torch]'"):
        build("recipe", {"_target_": "torch.nn.Linear"}, ("recipes",))
