"""Gradients on their way: a bucket of them, and an optimizer that steps those that have arrived."""

from collections.abc import Collection, Container

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.comm.bucket import Bucket
from trainer.comm.reduce import Reduced


class DeferredBucket:
    """One of DDP's buckets: the flat tensor of its gradients, and their mean to come."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params, self.bucket, self.missing = params, Bucket.of(params, 0), set(params)
        self.flat = params[0].new_empty(sum(p.numel() for p in params))
        self.mean = Reduced()

    def fill(self) -> None:
        """Fill the flat tensor with the gradients, zero for a parameter that has none, and free them."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        torch._foreach_copy_(self.bucket.gradients(self.flat), gradients)
        for p in self.params:
            p.grad = None


class BucketedStep:
    """Steps the parameters of some buckets at a time by `optimizer`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.group_of = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}

    def note(self) -> None:
        """Keep the present settings of the optimizer's groups, such as learning rates, for the deferred steps."""
        self.settings = [{**group, "params": []} for group in self.optimizer.param_groups]

    def step(self, buckets: Collection[DeferredBucket], unused: Container[Tensor]) -> None:
        """Step all parameters of `buckets` but the `unused` ones, by the mean of their gradients."""
        groups = [{**group, "params": []} for group in self.settings]
        for bucket in buckets:
            for p, gradient in zip(bucket.params, bucket.bucket.gradients(bucket.mean.wait()), strict=True):
                if p not in unused:
                    p.grad = gradient
                    groups[self.group_of[p]]["params"].append(p)
        everything = self.optimizer.param_groups
        self.optimizer.param_groups = [group for group in groups if group["params"]]
        self.optimizer.step()
        self.optimizer.param_groups = everything
        params = [p for bucket in buckets for p in bucket.params]
        torch.autograd.graph.increment_version(params)  # fused steps don't, and a weight used too soon must raise
        torch.clear_autocast_cache()
        for p in params:
            p.grad = None
