"""A bucket holds gradients as DDP would, and gives back their mean."""

import torch
from torch import Tensor, nn

from trainer.callbacks.overlap.callback import DeferredBucket


def test_gradients_are_taken_and_freed():
    """A parameter without one counts as zero; one whose memory is in another order keeps it."""
    turned, missing = nn.Parameter(torch.zeros(3, 2).t()), nn.Parameter(torch.zeros(2))
    gradient = torch.arange(6.0).view(3, 2).t()
    turned.grad = gradient.clone()
    bucket = DeferredBucket([turned, missing])
    assert bucket.missing == {turned, missing}
    bucket.flat.fill_(float("nan"))
    bucket.fill()
    assert bucket.flat.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    assert torch.equal(bucket.bucket.gradients(bucket.flat)[0], gradient)
    assert turned.grad is None and missing.grad is None


def test_what_no_rank_has_used_has_no_gradient():
    """A gradient of zero would decay it."""
    used, unused = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    bucket = DeferredBucket([used, unused])
    bucket.mean.set_result(torch.arange(12.0))
    rest: set[Tensor] = {unused}
    (gradient,) = (found := bucket.gradients(rest)).values()
    assert list(found) == [used] and gradient.tolist() == [[0, 1, 2], [3, 4, 5]]
