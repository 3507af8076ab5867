"""A placeholder for a parameter on another rank of a pipeline."""

import math
from typing import Any

import torch
from torch import Tensor, nn


class Absent(nn.Parameter):
    """A placeholder for another stage's parameter: its shape, dtype and device, with a single NaN as memory."""

    def copy_(self, *_: Any, **__: Any) -> "Absent":
        """Ignore the copy, because a loaded state has the parameters of all stages."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Convert the single number in memory."""
        return self.data.as_strided((), ()).to(*args, **kwargs).expand(self.shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Absent":
        return absent(self, self.device)


def absent(p: nn.Parameter, device: torch.device) -> Absent:
    """Return a parameter like `p` that takes no memory."""
    return Absent(torch.full((), math.nan, dtype=p.dtype, device=device).expand(p.shape), requires_grad=False)
