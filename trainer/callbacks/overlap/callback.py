"""Sends buckets of gradients in the order in which the next forward pass needs them, and only then steps each."""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.callback import Callback, Role, Symptom
from trainer.callbacks.overlap.cost import OverlapCost
from trainer.callbacks.overlap.send_order import PASSES, Record
from trainer.comm.bucket import Bucket
from trainer.comm.ranks import share_buffers
from trainer.comm.reduce import Background, Reduce, Reduced
from trainer.cost.setup import Cost
from trainer.cost.variant import Situation, Variant
from trainer.errors import ConfigError
from trainer.log import log
from trainer.optim.partial_step import OptimizerProxy, PartialStep
from trainer.optim.probe import refuse_coupled


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


class Overlap(Callback):
    """Hides communication behind the next forward pass, like ByteScheduler (Peng et al. 2019) or BytePS.

    DDP is only used in the rehearsal. Afterwards gradients go into buckets of DDP's layout, so the weights are
    bit-equal to DDP's at each step. Between steps they are one step behind, until `on_flush`.
    """

    role = Role.OPTIMIZER
    remedies = {Symptom.NETWORK: [{}]}
    communicates = True
    provides = frozenset({"defers", "own_order"})
    conflicts = {
        Role.COMPILE: "a compiled block ignores hooks that are added later, and overlap waits for weights in these; "
        "leave one out",
        "clip_value": "gradients are used bucket by bucket; set trainer.clip_value=null or leave overlap out",
        "clip": "the global norm is known only after all buckets; set trainer.clip_norm=null or leave overlap out",
        "fp16": "loss scaling must see all gradients first; use trainer.precision=bf16 or leave overlap out",
        "static_graph": "only DDP knows which parameters are used twice; "
        "set trainer.ddp.static_graph=false or leave overlap out",
    }

    def __init__(self) -> None:
        self.pending: dict[DeferredBucket, None] = {}  # sent but not stepped yet
        self.sent = 0  # buckets sent in this step
        self.fresh = True  # this step has had no forward pass yet
        self.unused: set[Tensor] = set()  # parameters that this rank did not use in the pending step

    @classmethod
    def variants(cls, at: Situation) -> Iterable[Variant]:
        return [Variant({})] if at.ranks > 1 else []

    def cost(self) -> Cost:
        return OverlapCost()

    def wrap_model(self, trainer, model: nn.Module) -> nn.Module:
        # Sending a bucket can't be interrupted, so small buckets are better, except that each NCCL call is expensive.
        mib = 25.0 if trainer.ranks.backend == "nccl" else 1.0
        trainer.ddp["bucket_cap_mb"] = trainer.ddp["bucket_cap_mb"] or mib
        return model

    def wrap_reduce(self, trainer, reduce: Reduce) -> Reduce:
        self.reduce, self.background = reduce, Background(trainer.device)
        self.record = Record(trainer.module, trainer.parameters)
        return self.record.timed(reduce)

    def wrap_optimizer(self, trainer, optimizer: Optimizer) -> Any:
        refuse_coupled(optimizer, "callbacks.overlap", by_parameter=True)
        self.trainer, self.steps = trainer, PartialStep(optimizer)
        return OptimizerProxy(optimizer, self.defer)

    def rehearse(self, trainer, run_pass: Callable[[Any], None], batch: Any) -> None:
        for _ in range(PASSES - len(self.record.passes)):
            run_pass(batch)

    def on_fit_start(self, trainer) -> None:
        log.info("overlap: train/grad_norm is not reported, since no moment has all reduced gradients")
        if set(trainer.parameters).difference(*self.record.layout):  # DDP still waits for some of them
            self._refuse_missing([p for p in trainer.parameters if p not in self.record.ready_s])
        needs = self.record.end()
        self.buckets = [DeferredBucket(params) for params in self.record.layout]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.order: list[int] = trainer.ranks.first(self.record.order())
        trainer.strategy.unwrap()
        # Run before other hooks, which may compute a weight from parameters, as torch.nn.utils.prune does.
        hooks = [trainer.module.register_forward_pre_hook(lambda module, _: self._share_buffers(module), prepend=True)]
        for module, params in needs.items():
            buckets = dict.fromkeys(self.bucket_of[p] for p in params if p in self.bucket_of)
            hooks.append(
                module.register_forward_pre_hook(lambda *_, buckets=buckets: self._finish(buckets), prepend=True)
            )
        hooks.append(trainer.module.register_forward_hook(lambda *_: self._finish(self.pending)))
        hooks += [p.register_post_accumulate_grad_hook(self._collect) for p in trainer.parameters]
        for hook in hooks:  # parameter hooks would keep the trainer alive, which Python's collector can't see
            trainer.undo.callback(hook.remove)

    def _share_buffers(self, module: nn.Module) -> None:
        """Broadcast rank 0's buffers before the first forward pass of a step, as DDP does."""
        if module.training and self.fresh:
            share_buffers(module, self.trainer.strategy.replicas, self.trainer.strategy.constant_buffers)
            self.fresh = False

    def on_flush(self, trainer) -> None:
        self._finish(self.pending)

    @torch.no_grad()
    def _collect(self, p: Tensor) -> None:
        """Note that the gradient of `p` is ready; send complete buckets in order."""
        bucket = self.bucket_of[p]
        bucket.missing -= {p} if self.trainer.strategy.syncing else set()  # the step's last micro-batch
        if not bucket.missing:
            bucket.fill()
            self._send()

    def _send(self) -> None:
        while self.sent < len(self.order) and not self.buckets[self.order[self.sent]].missing:
            sending = self.buckets[self.order[self.sent]]
            sending.bucket = Bucket.of(sending.params, self.trainer.step)
            sending.mean = self.background.submit(self.reduce, sending.flat, sending.bucket)
            self.sent += 1

    def _refuse_missing(self, missing: list[Tensor]) -> None:
        names: dict[Tensor, str] = {p: name for name, p in self.trainer.module.named_parameters()}
        raise ConfigError(
            f"overlap: no gradient for {', '.join(names[p] for p in missing)} in the last micro-batch of a step; use "
            "every parameter in every loss, or set trainer.ddp.find_unused_parameters=true, or leave overlap out"
        )

    def defer(self) -> None:
        """Defer the step of every bucket, at this step's learning rates."""
        self._finish(self.pending)  # empty, unless the recipe bypassed the model's forward pass
        if self.trainer.options.ddp.find_unused_parameters:
            self._send_unused()
        elif self.sent < len(self.order):
            self._refuse_missing([p for bucket in self.buckets for p in bucket.params if p in bucket.missing])
        self.steps.note()
        for bucket in self.buckets:
            bucket.missing = set(bucket.params)
        self.pending = dict.fromkeys(self.buckets)
        self.sent, self.fresh, self.trainer.lag = 0, True, 1

    def _send_unused(self) -> None:
        """Send the buckets that still wait for gradients. A parameter that no rank used is not stepped."""
        late = [bucket for bucket in self.buckets if bucket.missing]
        self.unused = {p for bucket in late for p in bucket.missing if p.grad is None}
        self.unused_by = self.trainer.ranks.agree(tuple(int(p in self.unused) for p in self.trainer.parameters))
        for bucket in late:
            bucket.fill()
            bucket.missing.clear()
        self._send()

    @torch.no_grad()
    def _finish(self, buckets: Mapping[DeferredBucket, None]) -> None:
        """Wait for these buckets; step them and all others that have arrived."""
        if needed := self.pending.keys() & buckets.keys():
            for bucket in needed:
                bucket.mean.wait()
            there = [bucket for bucket in self.pending if bucket in needed or bucket.mean.arrived()]
            unused = self._by_no_rank() if any(self.unused.intersection(bucket.params) for bucket in there) else ()
            self.steps.step({p: mean for bucket in there for p, mean in bucket.gradients(unused).items()})
            for bucket in there:
                del self.pending[bucket]
            self.trainer.lag = 1 if self.pending else 0

    def _by_no_rank(self) -> set[Tensor]:
        counts = zip(self.trainer.parameters, self.unused_by(), strict=True)
        return {p for p, count in counts if count == self.trainer.world}
