"""Stages 1 and 2: each rank keeps only the optimizer state, and the gradients, of its own parameters."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from trainer.callbacks.shard.owners import Owners
from trainer.comm.bucket import Bucket
from trainer.comm.ranks import share_buffers
from trainer.comm.reduce import AllReduce, Reduce, Reduced
from trainer.context import Context
from trainer.errors import ConfigError
from trainer.parallel.ddp import DDP
from trainer.parallel.strategy import zero_loss

MIB, FIRST_BYTES, DEFAULT_MIB = 1 << 20, 1 << 20, 25  # DDP's


class ZeRO1(DDP):
    """DDP with optimizer state sharded by whole parameters (Rajbhandari et al. 2019, arXiv:1910.02054, P_os).

    Gradients are reduced as in DDP, so weights are bit-equal to plain training's.
    """

    def __init__(self, trainer: Context, module: nn.Module, reduce: Reduce | None) -> None:
        super().__init__(module, trainer.rank, trainer.world, trainer.device, trainer.ddp, reduce, lambda: trainer.step)
        self.owners = Owners(self.parameters, trainer.ranks.new_group())
        self.owned: Collection[Tensor] | None = self.owners.own


class ZeRO2(ZeRO1):
    """The bare model, whose gradients are reduced by hooks (Rajbhandari et al. 2019, arXiv:1910.02054, P_os+g).

    The buckets are DDP's, and each goes through the Reduce chain, so weights are bit-equal to DDP's. Once a bucket is
    reduced, its memory is freed, except for the gradients of this rank's own parameters. Only the last micro-batch of a
    step reduces; until then, whole gradients accumulate.
    """

    def __init__(self, trainer: Context, module: nn.Module) -> None:
        self.hooks: list[Any] = []
        self.layout: list[list[int]] = []
        super().__init__(trainer, module, trainer.reduce or AllReduce(trainer.ranks.new_group()))
        self.ranks, self.scales = trainer.ranks, trainer.precision.scaler.is_enabled()
        if self.scales and not all(self.owners.by_rank):
            self.unwrap()
            raise ConfigError(
                f"callbacks.shard.stage=2: {len(self.parameters)} parameters for {trainer.world} ranks leave "
                "one without, and fp16's scaler needs a gradient on each; use stage=1, or trainer.precision=bf16"
            )
        self.names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
        self.index: dict[Tensor, int] = {p: i for i, p in enumerate(self.parameters)}
        grouped = _group_tensors_by_device_and_dtype([[*self.parameters]], with_indices=True)
        self.norm_order = [
            self.parameters[i] for _, indices in grouped.values() for i in indices
        ]  # as torch sums a norm
        self.norm_dtype = functools.reduce(torch.promote_types, {p.dtype: None for p in self.parameters})
        self.arrived: list[int] = []  # the order of gradients in the first pass
        self.missing: list[set[Tensor]] = []  # per bucket, the parameters without a gradient yet
        self.sent: list[tuple[list[Tensor], Reduced]] = []  # own parameters of each sent bucket, and their gradients
        self.bucket_of: dict[Tensor, int] = {}
        self.begun = False  # a gradient of this backward pass has arrived
        self.fresh = True  # the step has had no forward pass yet

    def lay_out(self, arguments: dict[str, Any]) -> None:
        """Broadcast rank 0's weights and buffers, as DDP does, and register gradient hooks."""
        assert self.replicas
        dist._broadcast_coalesced(self.replicas, [p.detach() for p in self.module.parameters()], 250 * MIB, 0)
        share_buffers(self.module, self.replicas)
        self.hooks = [p.register_post_accumulate_grad_hook(self._collect) for p in self.parameters]
        # A lambda, because a copy of the module, such as an average of weights, can't copy a method's process groups.
        self.hooks.append(self.module.register_forward_pre_hook(lambda module, _: self._share_buffers(module)))

    def unwrap(self) -> None:
        for hook in self.hooks:  # parameter hooks would keep the trainer alive, which Python's collector can't see
            hook.remove()
        self.hooks = []

    def warm_up(self, run_pass: Callable[[], None]) -> None:
        """Run two passes: the first records the order of gradients, from which the buckets are made. A collective."""

        def run_and_lay_out() -> None:
            run_pass()
            if not self.layout:
                self.layout = self._cut_buckets(self.ranks.first(self.arrived))
                self._begin_step()

        super().warm_up(run_and_lay_out)

    def share_buffers(self) -> None:
        if self.fresh:
            share_buffers(self.module, self.replicas, self.constant_buffers)
            self.fresh = False

    def reduce_gradients(self) -> None:
        """Reduce the accumulated gradients, with a backward pass that adds zero to each and so fires the hooks."""
        self.sync_gradients(True)
        zero_loss(self.parameters, unused=False).backward()

    @property
    def bucket_bytes(self) -> int:
        return 0

    def buckets(self) -> list[list[int]]:
        return self.layout

    def _cut_buckets(self, order: list[int]) -> list[list[int]]:
        """Split the parameters into buckets as DDP does after its first pass."""
        if len(order) < len(self.parameters):
            self._refuse_missing([p for i, p in enumerate(self.parameters) if i not in set(order)])
        mib = self.arguments["bucket_cap_mb"]
        limits = [FIRST_BYTES, DEFAULT_MIB * MIB] if mib is None else [int(mib * MIB)] * 2
        return dist._compute_bucket_assignment_by_size([self.parameters[i] for i in order], limits, [], order)[0]

    def _begin_step(self) -> None:
        self.missing = [{self.parameters[i] for i in bucket} for bucket in self.layout]
        self.bucket_of = {p: number for number, params in enumerate(self.missing) for p in params}
        self.sent, self.begun, self.fresh = [], False, True

    def _share_buffers(self, module: nn.Module) -> None:
        """Broadcast rank 0's buffers before the first forward pass of a step, as DDP does."""
        if module is self.module and module.training:
            self.share_buffers()

    @torch.no_grad()
    def _collect(self, p: Tensor) -> None:
        """Note that the gradient of `p` is ready; send complete buckets in order."""
        if not self.syncing:
            return
        if not self.layout:
            self.arrived.append(self.index[p])
            p.grad = None
            return
        missing = self.missing[self.bucket_of[p]]
        if p not in missing:
            raise ConfigError(f"shard: {self.names[p]} has two gradients in one backward pass; set stage=1")
        if not self.begun:
            self.begun = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        missing.remove(p)
        while len(self.sent) < len(self.layout) and not self.missing[len(self.sent)]:
            self._send([self.parameters[i] for i in self.layout[len(self.sent)]])

    def _send(self, params: list[nn.Parameter]) -> None:
        bucket = Bucket.of(params, self.step())
        flat = params[0].new_empty(bucket.numel())
        bucket.take_gradients(flat)
        assert self.background
        self.sent.append(
            ([p for p in params if p in self.owners.own], self.background.submit(self._keep, flat, bucket))
        )

    def _keep(self, flat: Tensor, bucket: Bucket) -> Tensor:
        """Reduce a bucket, and return the gradients of this rank's own parameters plus one element.

        The element is 0, or NaN if fp16's scaler has to skip the step, which otherwise only a gradient's owner would
        see.
        """
        assert self.reduce
        mean = self.reduce(flat, bucket)
        own = [p for p, _, _ in bucket.pieces if p in self.owners.own]
        kept = mean.new_zeros(sum(p.numel() for p in own) + 1)
        gradients = [
            g for (p, _, _), g in zip(bucket.pieces, bucket.gradients(mean), strict=True) if p in self.owners.own
        ]
        if own:
            torch._foreach_copy_(Bucket.of(own, bucket.step).gradients(kept[:-1]), gradients)
        if self.scales:
            kept[-1] = torch.where(mean.isfinite().all(), 0.0, torch.nan)
        return kept

    @torch.no_grad()
    def _finish(self) -> None:
        """Wait for the gradients of this rank's own parameters, at the end of the backward pass."""
        self._refuse_missing([p for missing in self.missing for p in missing])
        found: list[Tensor] = []
        flags: list[Tensor] = []
        for own, done in self.sent:
            kept = done.wait()
            gradients = Bucket.of(own, self.step()).gradients(kept[:-1])
            for p, gradient in zip(own, gradients, strict=True):
                p.grad = gradient
            found += gradients
            flags.append(kept[-1].float())
        if self.scales:
            torch._foreach_mul_(found, 1.0 + torch.stack(flags).sum())
        self._begin_step()

    def _refuse_missing(self, missing: list[Any]) -> None:
        if missing:
            names = ", ".join(self.names[p] for p in missing)
            raise ConfigError(
                f"shard: no gradient for {names} in the last micro-batch of a step; use every parameter in every loss, "
                "or set callbacks.shard.stage=1 with trainer.ddp.find_unused_parameters=true"
            )

    def clip(self, max_norm: float | None) -> Tensor:
        """Clip by the norm over all ranks' gradients, bit-equal to the norm of unsharded gradients. A collective."""
        own = [p for p in self.parameters if p in self.owners.own and p.grad is not None]
        found = torch._foreach_norm([p.grad for p in own]) if own else []  # pyright: ignore[reportArgumentType]
        zero, by_parameter = torch.zeros((), device=self.device), dict[Tensor, Tensor](zip(own, found, strict=True))
        norms = torch.stack([by_parameter.get(p, zero).double() for p in self.norm_order])
        dist.all_reduce(norms, group=self.owners.group)  # each is nonzero on one rank only
        norm = torch.linalg.vector_norm(norms.to(self.norm_dtype))
        if max_norm is not None:
            clip_grads_with_norm_(own, max_norm, norm)
        return norm
