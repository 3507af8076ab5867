"""The two halves of 1-bit Adam: a mean over ranks that is sent as signs, and AdamW steps with a frozen variance."""

import math
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW

from trainer.comm.bucket import Bucket, flatten
from trainer.comm.codecs.base import Residuals
from trainer.comm.codecs.sign import Sign
from trainer.comm.reduce import AllReduce


class SignedMean:
    """Averages vectors over ranks as signs: each rank averages one shard and sends its mean to all.

    Both messages have the signs and the mean magnitude of each piece of a shard: a parameter, or part of one. Paper:
    Tang et al. 2021, arXiv:2102.02888. Nothing is lost. Over many steps, the outputs and the errors (the mean of the
    workers', all of the servers') add up to the mean of the inputs. `like` is empty, and has the vector's dtype and
    device.
    """

    def __init__(self, ends: AllReduce, bucket: Bucket, like: Tensor, worker: Residuals, server: Residuals) -> None:
        self.ends, self.codec = ends, Sign()
        count, rank = bucket.numel(), ends.group.rank()
        size = -(-count // ends.size)
        self.starts = range(0, size * ends.size, size)  # starts of shards; the last ones may be shorter, or empty
        self.shards = [bucket.cut(start, start + size) for start in self.starts]
        self.own = self.shards[rank]
        self.worker_error = worker.of(bucket, like.new_empty(count))
        self.server_error = server.of(self.own, self._cut(self.worker_error)[rank])

    def __call__(self, flat: Tensor) -> Tensor:
        """Replace `flat` by its mean over the ranks, as far as it is sent. A collective."""
        self.worker_error += flat
        sent = [self._encode(*shard) for shard in zip(self._cut(self.worker_error), self.shards, strict=True)]
        rows = self.ends.swap(pad_sequence(sent, batch_first=True))
        for row in rows:
            self.codec.decode(row, self.server_error, 1.0 / len(rows), self.own)
        mean = self._encode(self.server_error, self.own)
        rows = self.ends.gather(pad(mean, (0, rows.shape[1] - len(mean))))
        for row, part, shard in zip(rows, self._cut(flat.zero_()), self.shards, strict=True):
            self.codec.decode(row, part, 1.0, shard)
        return flat

    def _cut(self, flat: Tensor) -> list[Tensor]:
        return [flat[start : start + self.starts.step] for start in self.starts]

    def _encode(self, error: Tensor, bucket: Bucket) -> Tensor:
        """Encode `error`, and leave the unsent part in it."""
        if not bucket.pieces:
            return error.new_empty(0, dtype=torch.uint8)
        payload = self.codec.encode(error, bucket)
        self.codec.decode(payload, error, -1.0, bucket)
        return payload


class OneBit:
    """Wraps `optimizer`, which steps by itself until `freeze`.

    Afterwards each rank adds its own gradients to the momenta. The weights move by the mean momentum divided by the
    root of the frozen variance. Bias corrections remain, so that steps do not jump: the momentum's continues, and the
    variance's is frozen with it. An element with zero variance does not move, because a sign is never zero.
    """

    def __init__(self, optimizer: AdamW) -> None:
        self.optimizer = optimizer
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.mean: SignedMean | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def freeze(self, frozen_step: int, ends: AllReduce, worker: Residuals, server: Residuals) -> None:
        """Freeze the variance, which has seen `frozen_step` steps.

        0 means as many steps as the momentum, and corrects its bias now. An AdamW that resumes from this state makes
        steps that are too short, if anything.
        """
        self.count = int(self.optimizer.state[self.params[0]]["step"])
        for group in self.optimizer.param_groups if not frozen_step else ():
            correction = 1 - group["betas"][1] ** self.count
            torch._foreach_div_(self._state("exp_avg_sq", group["params"]), correction)
        self.frozen_step = frozen_step or self.count
        dtype = reduce(torch.promote_types, (p.dtype for p in self.params), torch.float32)
        self.bucket = Bucket.of(self.params, 0, "momenta")
        self.mean = SignedMean(ends, self.bucket, self.params[0].new_empty(0, dtype=dtype), worker, server)

    @torch.no_grad()
    def step(self) -> None:
        if self.mean is None:
            self.optimizer.step()
            return
        self.count += 1
        for group in self.optimizer.param_groups:
            # A parameter on which this rank's loss does not depend has no gradient, because no DDP supplies one.
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in group["params"]]
            torch._foreach_lerp_(self._state("exp_avg", group["params"]), gradients, 1 - group["betas"][0])
            torch._foreach_add_(self._state("step", group["params"]), 1)
        momenta = self._state("exp_avg", self.params)
        mean = self.mean(flatten(momenta).to(self.mean.worker_error.dtype))
        torch._foreach_copy_(momenta, self.bucket.split(mean))
        for group in self.optimizer.param_groups:
            self._move(group)

    def _move(self, group: dict[str, Any]) -> None:
        params, beta1, lr = group["params"], group["betas"][0], group["lr"]
        roots = torch._foreach_sqrt(self._state("exp_avg_sq", params))
        for root in roots:
            root.masked_fill_(root == 0, math.inf)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        momenta = self._state("exp_avg", params)
        torch._foreach_addcdiv_(params, momenta, roots, value=-lr / (1 - beta1**self.count))

    def _state(self, key: str, params: list[Tensor]) -> list[Tensor]:
        return [self.optimizer.state[p][key] for p in params]
