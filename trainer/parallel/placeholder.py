"""A placeholder for a parameter on another rank of a pipeline."""

import math
from typing import Any

import torch
from torch import Tensor, nn


class Placeholder(nn.Parameter):
    """Stands for a parameter of another pipeline stage: its shape, dtype and device, with a single NaN as memory."""

    def copy_(self, *_: Any, **__: Any) -> "Placeholder":
        """Ignore the copy, because a loaded state has the parameters of all stages."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Convert the single number in memory."""
        return self.data.as_strided((), ()).to(*args, **kwargs).expand(self.shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Placeholder":
        return placeholder(self, self.device)


def placeholder(p: nn.Parameter, device: torch.device) -> Placeholder:
    return Placeholder(torch.full((), math.nan, dtype=p.dtype, device=device).expand(p.shape), requires_grad=False)
