"""Reduces and steps each bucket during the next forward pass, when the first module that needs it is called.

The idea is ByteScheduler's (Peng et al. 2019) and BytePS's cross-barrier: backward does not wait for the network.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from trainer.callback import Callback, Role
from trainer.reduce import Background, Bucket, Reduce
from trainer.run import log

SUMMED_LATER = "which is known only after all buckets, and overlap steps each one alone"


class Pending:
    """One bucket on its way: the sum to come, its parameters, and the optimizer's groups as they were for this step."""

    def __init__(self, sum_to_come: "Future[Tensor]", params: list[Tensor]) -> None:
        self.sum_to_come, self.params = sum_to_come, params
        self.groups: list[dict[str, Any]] = []


class Overlap(Callback):
    """The weights are bit for bit plain DDP's, step for step; between steps they are one step behind until `on_flush`.

    Memory: one extra copy of the gradients. Hooks: one per module that uses parameters.
    """

    role = Role.OPTIMIZER
    communicates = True
    defers = True
    conflicts = {
        "clip": f"clipping needs the global norm, {SUMMED_LATER}; set trainer.clip_norm=null or leave overlap out",
        "fp16": "loss scaling must see all gradients before any is used; use bf16 or leave overlap out",
        "find_unused_parameters": "which parameters no rank has used, so must not be stepped, is known to DDP alone; "
        "set trainer.ddp.find_unused_parameters=false or leave overlap out",
        "static_graph": "which parameters stay without a gradient, so must not be stepped, is known to DDP alone; "
        "set trainer.ddp.static_graph=false or leave overlap out",
        "gradient_as_bucket_view": "the bucket is used again while it is still being stepped; "
        "set trainer.ddp.gradient_as_bucket_view=false or leave overlap out",
    }

    def __init__(self) -> None:
        self.pending: dict[Tensor, Pending] = {}
        self.in_flight: list[Pending] = []

    def wrap_reduce(self, trainer, reduce: Reduce) -> Reduce:
        background = Background(trainer.device)

        def launch(flat: Tensor, bucket: Bucket) -> Tensor:
            if trainer.rehearsing:
                return reduce(flat, bucket)
            params = [piece.param for piece in bucket.pieces]
            self.in_flight.append(Pending(background.submit(reduce, flat.clone(), bucket), params))
            return flat  # the backward pass need not wait

        return launch

    def wrap_optimizer(self, trainer, optimizer: Optimizer) -> Any:
        self.trainer, self.optimizer = trainer, optimizer
        self.group_of = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        modules = list(trainer.module.modules())
        self.called: set[nn.Module] = set()
        self.recorders = [m.register_forward_pre_hook(lambda module, _: self.called.add(module)) for m in modules]
        return Deferred(optimizer, self)

    def on_fit_start(self, trainer) -> None:
        log.info("overlap: train/grad_norm is not reported, for no moment has all reduced gradients")
        for recorder in self.recorders:
            recorder.remove()
        for module, params in needed_by(trainer.module, trainer.module, self.called).items():
            self._finish_before(module, params)
        # What no module has asked for.
        trainer.module.register_forward_hook(lambda *_: self._finish(list(self.pending)))

    def _finish_before(self, module: nn.Module, params: list[Tensor]) -> None:
        module.register_forward_pre_hook(lambda *_: self._finish(params))

    def on_flush(self, trainer) -> None:
        self._finish(list(self.pending))

    def defer(self) -> None:
        """Note that every bucket in flight is to be stepped, at this step's learning rates."""
        self._finish(list(self.pending))  # none, unless the recipe's forward pass went around the model's
        for bucket in self.in_flight:
            groups = [{**group, "params": []} for group in self.optimizer.param_groups]
            for p in bucket.params:
                groups[self.group_of[p]]["params"].append(p)
            bucket.groups = [group for group in groups if group["params"]]
            self.pending |= dict.fromkeys(bucket.params, bucket)
        self.in_flight = []
        self.trainer.lag = 1 if self.pending else 0

    @torch.no_grad()
    def _finish(self, params: list[Tensor]) -> None:
        if not self.pending:
            return
        for p in params:
            if p in self.pending:
                self._step(self.pending[p])
        if not self.pending:
            self.trainer.lag = 0

    def _step(self, bucket: Pending) -> None:
        sums = bucket.sum_to_come.wait().split([p.numel() for p in bucket.params])
        for p, gradient in zip(bucket.params, sums, strict=True):
            p.grad = gradient.view_as(p)
            del self.pending[p]
        everything = self.optimizer.param_groups
        self.optimizer.param_groups = bucket.groups
        self.optimizer.step()
        self.optimizer.param_groups = everything
        torch.autograd.graph.increment_version(bucket.params)  # fused steps don't: a weight used too soon is an error
        for p in bucket.params:
            p.grad = None


def needed_by(module: nn.Module, caller: nn.Module, called: set[nn.Module]) -> dict[nn.Module, list[Tensor]]:
    """The parameters that must be there when a module is called: its own, and those of children that nobody calls, as
    nn.MultiheadAttention uses its projection's weight but not the projection. `called` is what the rehearsal saw."""
    caller = module if module in called else caller
    own: list[Tensor] = list(module.parameters(recurse=False))
    needed = {caller: own} if own else {}
    for child in module.children():
        for user, params in needed_by(child, caller, called).items():
            needed[user] = needed.get(user, []) + params
    return needed


class Deferred:
    """Stands for `optimizer`, but `step` only notes that the buckets in flight are to be stepped."""

    def __init__(self, optimizer: Optimizer, overlap: Overlap) -> None:
        self.optimizer, self.overlap = optimizer, overlap

    def step(self) -> None:
        self.overlap.defer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
