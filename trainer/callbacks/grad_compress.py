"""Sends gradients in fewer bits."""

from typing import Literal

import torch
from torch import Tensor
from torch.distributed import GradBucket

from trainer.callback import Callback, Role
from trainer.distributed import Reduce

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class GradCompress(Callback):
    """Casts each bucket before it is reduced, and back after: half of float32's bytes.

    The cast, the division by the number of ranks and each addition round by at most u = 2^-8 (bf16) or 2^-11 (fp16), so
    an element of the mean is off by about (world + 1) * u times the mean of its absolute values over ranks, at most.
    fp16 overflows above 65,504, and below 6e-5 it rounds coarser than that.

    Args:
        codec: `bf16` has float32's range and 8 bits of precision, `fp16` 11 bits.
    """

    role = Role.COMPRESS
    exact = False
    communicates = True

    def __init__(self, codec: Literal["bf16", "fp16"] = "bf16") -> None:
        self.dtype = DTYPES[codec]
        if codec == "fp16":
            self.conflicts = {
                "fp16": "gradients times the loss scale overflow on the way; use codec=bf16 or trainer.precision=bf16"
            }

    def error_bound(self, world: int) -> float:
        """Of one step's mean gradient, relative in the L2 norm, where ranks' gradients do not cancel."""
        return (world + 1) * torch.finfo(self.dtype).eps / 2

    def wrap_reduce(self, trainer, reduce: Reduce) -> Reduce:
        def compressed(flat: Tensor, bucket: GradBucket) -> Tensor:
            return reduce(flat.to(self.dtype), bucket).to(flat.dtype)

        return compressed
