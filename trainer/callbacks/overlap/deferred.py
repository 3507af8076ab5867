"""A bucket of gradients in flight."""

from collections.abc import Container

from torch import Tensor

from trainer.comm.bucket import Bucket
from trainer.comm.reduce import Reduced


class DeferredBucket:
    """One of DDP's buckets: the flat tensor of its gradients, and their pending mean."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params, self.bucket, self.missing = params, Bucket.of(params, 0), set(params)
        self.flat = params[0].new_empty(self.bucket.numel())
        self.mean = Reduced()

    def fill(self) -> None:
        """Copy the gradients into the flat tensor, and free them."""
        self.bucket.take_gradients(self.flat)

    def gradients(self, unused: Container[Tensor]) -> dict[Tensor, Tensor]:
        """Wait for the mean; return each parameter's part of it, except for the `unused` ones."""
        means = zip(self.params, self.bucket.gradients(self.mean.wait()), strict=True)
        return {p: mean for p, mean in means if p not in unused}
