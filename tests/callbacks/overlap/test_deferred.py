"""A bucket holds gradients as DDP would, and is stepped alone, by the settings of the step that it belongs to."""

import torch
from torch import Tensor, nn

from trainer.callbacks.overlap.deferred import BucketedStep, DeferredBucket


def params(*values: float) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((2, 3), value)) for value in values]


def arrived(bucket: DeferredBucket, mean: float) -> DeferredBucket:
    bucket.mean.set_result(torch.full_like(bucket.flat, mean))
    return bucket


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


def test_a_bucket_is_stepped_alone_by_the_settings_that_were_noted():
    a, b, c = params(1.0, 1.0, 1.0)
    optimizer = torch.optim.SGD([{"params": [a, b]}, {"params": [c], "lr": 0.5}], lr=0.1)
    groups, steps = optimizer.param_groups, BucketedStep(optimizer)
    steps.note()
    for group in groups:
        group["lr"] = 100.0  # of the next step
    steps.step([arrived(DeferredBucket([c, a]), 2.0)], ())
    for p, value in ((a, 0.8), (b, 1.0), (c, 0.0)):
        torch.testing.assert_close(p.detach(), torch.full((2, 3), value))
        assert p.grad is None
    assert optimizer.param_groups is groups


def test_what_no_rank_has_used_is_not_stepped():
    """A gradient of zero would decay it."""
    used, unused = params(1.0, 1.0)
    steps = BucketedStep(torch.optim.SGD([used, unused], lr=0.1, weight_decay=1.0))
    steps.note()
    rest: set[Tensor] = {unused}
    steps.step([arrived(DeferredBucket([used, unused]), 0.0)], rest)
    torch.testing.assert_close(used.detach(), torch.full((2, 3), 0.9))
    assert torch.equal(unused, torch.ones(2, 3))


def test_autograd_sees_a_fused_step():
    """Else a weight that is used too soon would be no error."""
    (p,) = params(1.0)
    steps, version = BucketedStep(torch.optim.AdamW([p], fused=True)), p._version
    steps.note()
    steps.step([arrived(DeferredBucket([p]), 1.0)], ())
    assert p._version > version and not torch.equal(p, torch.ones(2, 3))
