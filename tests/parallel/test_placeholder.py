"""A parameter that another rank of a pipeline has."""

import copy

import torch
from torch import nn

from trainer.parallel.placeholder import Placeholder, placeholder


def test_an_absent_parameter_has_its_form_and_no_memory() -> None:
    p = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
    found = placeholder(p, torch.device("cpu"))
    assert found.shape == p.shape and found.dtype == p.dtype and found.isnan().all() and not found.requires_grad
    assert found.untyped_storage().nbytes() == 8
    for other in (copy.deepcopy(found), found.copy_(p)):
        assert isinstance(other, Placeholder) and other.shape == p.shape and other.isnan().all()
    half = found.to(torch.bfloat16)
    assert half.dtype == torch.bfloat16 and half.shape == p.shape and half.untyped_storage().nbytes() == 2
