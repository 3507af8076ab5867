"""Parameters that DDP ignores, and that are reduced together after its buckets."""

from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.comm.bucket import Bucket
from trainer.comm.reduce import AllReduce
from trainer.context import Context
from trainer.errors import ConfigError, nearest


class DelayedParameters:
    """Reduces the parameters that match `patterns` through the trainer's chain, after the backward pass.

    DDP's own argument, `delay_all_reduce_named_params`, bypasses the chain and waits for nothing: with gloo, gradients
    still change after `backward` has returned.
    """

    def __init__(self, trainer: Context, model: nn.Module, patterns: list[str]) -> None:
        named = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        found: dict[Tensor, None] = {}
        for pattern in patterns:
            matching = [p for name, p in named.items() if name == pattern or fnmatchcase(name, pattern)]
            if not matching:
                key = f"callbacks.bucket.delayed={pattern}"
                raise ConfigError(f"{key}: no trainable parameter has this name; {nearest(pattern, named)}")
            found |= dict.fromkeys(matching)
        if len(found) == len(set(named.values())):
            raise ConfigError(f"callbacks.bucket.delayed={patterns}: names all trainable parameters; leave some to DDP")
        self.trainer, self.reduce = trainer, AllReduce(trainer.ranks.new_group())
        self.params, self.queued, self.reduced = found, False, False
        self.names: dict[Tensor, str] = {p: name for name, p in named.items()}
        ignored = [name for name, p in named.items() if p in found]  # a tied parameter has several names
        ignored += [f".{name}" for name in ignored if "." not in name]  # DDP's names for parameters of the root
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        for p in found:
            dist.broadcast(p.data, 0)  # DDP only broadcasts the parameters that it does not ignore
            # This hook would keep the trainer alive, which Python's collector can't see.
            trainer.undo.callback(p.register_post_accumulate_grad_hook(self._note).remove)

    def _note(self, p: Tensor) -> None:
        strategy = self.trainer.strategy
        if not self.queued and strategy.model is not self.trainer.module and strategy.syncing:
            self.queued = True
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._reduce))  # after DDP's own callback: the chain reduces one bucket at a time

    @torch.no_grad()
    def _reduce(self) -> None:
        self.queued, self.reduced = False, not self.trainer.rehearsing
        self._refuse([p for p in self.params if p.grad is None])
        reduce = self.trainer.reduce or self.reduce
        for dtype in {p.dtype: None for p in self.params}:
            params = [p for p in self.params if p.dtype == dtype]
            bucket = Bucket.of(params, self.trainer.step)
            flat = params[0].new_empty(bucket.numel())
            bucket.take_gradients(flat)
            for p, gradient in zip(params, bucket.gradients(reduce(flat, bucket)), strict=True):
                p.grad = gradient

    def check(self) -> None:
        """Refuse a step in which no delayed parameter had a gradient, so nothing was reduced."""
        if self.trainer.strategy.model is not self.trainer.module and not self.reduced:
            self._refuse(list(self.params))
        self.reduced = False

    def _refuse(self, missing: list[Tensor]) -> None:
        if missing:
            names = ", ".join(self.names[p] for p in missing)
            raise ConfigError(
                f"bucket: no gradient for {names} in the last micro-batch of a step; use every parameter in every "
                "loss, or leave these out of callbacks.bucket.delayed"
            )
