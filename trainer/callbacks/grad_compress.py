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

    Every rank rounds its gradients once and every addition rounds again, so an element is off by at most about
    world * 2^-9 (bf16) or world * 2^-12 (fp16) of the largest partial sum. fp16 overflows above 65,504.

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
        return world * torch.finfo(self.dtype).eps / 2

    def wrap_reduce(self, trainer, reduce: Reduce) -> Reduce:
        def compressed(flat: Tensor, bucket: GradBucket) -> Tensor:
            return reduce(flat.to(self.dtype), bucket).to(flat.dtype)

        return compressed
