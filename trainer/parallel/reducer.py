"""Averages a pipeline stage's gradients over its replicas during the last backward passes of a step."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.comm.bucket import Bucket, flatten
from trainer.comm.reduce import Background, Reduce, Reduced
from trainer.errors import ConfigError

BUCKET_BYTES = 25 << 20  # bucket size in bytes, the same as DDP's


def cut_buckets(parameters: Sequence[Tensor], most: int) -> list[list[int]]:
    """Group the parameters into buckets of one dtype, last first, which is roughly the order of their gradients."""
    buckets: list[list[int]] = []
    size = most
    for i in reversed(range(len(parameters))):
        p = parameters[i]
        if size + p.nbytes > most or p.dtype != parameters[buckets[-1][0]].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(i)
        size += p.nbytes
    return buckets


class Reducer:
    """Reduces a bucket once each parameter has the gradients of all its `passes`, which are micro-batches or more.

    Buckets are sent in order, so that all replicas send the same ones. A schedule that computes weight gradients
    outside autograd, such as zero bubble, fires no hooks; `finish` sends the rest. Without replicas, `reduce` is None.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        passes: Sequence[int],
        reduce: Reduce | None,
        names: Sequence[str],
        device: torch.device,
    ) -> None:
        self.parameters, self.passes, self.reduce, self.names = parameters, passes, reduce, names
        self.buckets = cut_buckets(parameters, BUCKET_BYTES)
        self.bucket_of = {i: number for number, bucket in enumerate(self.buckets) for i in bucket}
        self.step = 0  # the step of these gradients
        self.background = Background(device) if reduce else None
        self.hooks: list[Any] = []
        if reduce:
            self.hooks = [
                p.register_post_accumulate_grad_hook(partial(self._arrive, i)) for i, p in enumerate(parameters)
            ]
        self._begin()

    def close(self) -> None:
        for hook in self.hooks:  # parameter hooks would keep their owner alive, which Python's collector can't see
            hook.remove()

    def _begin(self) -> None:
        self.left = [*self.passes]  # per parameter, gradients still to come
        self.missing = [len(bucket) for bucket in self.buckets]  # per bucket, parameters with gradients to come
        self.sent: list[tuple[list[Tensor], Bucket, Reduced]] = []
        self.next = 0  # the next bucket to send

    @torch.no_grad()
    def _arrive(self, index: int, _: Tensor) -> None:
        if not self.left[index]:
            raise ConfigError(
                f"pipeline: {self.names[index]} has two gradients in one backward pass; use each block once in a pass"
            )
        self.left[index] -= 1
        self.missing[self.bucket_of[index]] -= not self.left[index]
        while self.next < len(self.buckets) and not self.missing[self.next]:
            self._send()

    def _send(self) -> None:
        indices = self.buckets[self.next]
        self.next += 1
        params, grads = [self.parameters[i] for i in indices], list[Tensor]()
        for p in params:
            if p.grad is None:  # unused on this replica, perhaps not on another
                p.grad = torch.zeros_like(p)
            grads.append(p.grad)
        bucket = Bucket.of(params, self.step)
        assert self.background and self.reduce
        self.sent.append((grads, bucket, self.background.submit(self.reduce, flatten(grads), bucket)))

    @torch.no_grad()
    def finish(self) -> None:
        """Send the remaining buckets, and wait until all gradients are averaged."""
        if self.reduce:
            while self.next < len(self.buckets):
                self._send()
            for grads, bucket, done in self.sent:
                torch._foreach_copy_(grads, bucket.split(done.wait()))
        self._begin()
