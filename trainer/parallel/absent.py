"""A parameter that another rank of a pipeline has."""

import math
from typing import Any

import torch
from torch import Tensor, nn


class Absent(nn.Parameter):
    """A parameter that another stage has: its shape, dtype and device, and a single NaN as memory."""

    def copy_(self, *_: Any, **__: Any) -> "Absent":
        """Copy nothing: a state that is loaded has the parameters of all stages."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Convert the one number that is there."""
        return self.data.as_strided((), ()).to(*args, **kwargs).expand(self.shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Absent":
        return absent(self, self.device)


def absent(p: nn.Parameter, device: torch.device) -> Absent:
    """Return a parameter like `p` that takes no memory."""
    return Absent(torch.full((), math.nan, dtype=p.dtype, device=device).expand(p.shape), requires_grad=False)
