"""Sets the size of the buckets in which DDP reduces gradients (Li et al. 2020, arXiv:2006.15704)."""

import inspect
import math
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.callback import Callback, Role
from trainer.errors import ConfigError, nearest, require
from trainer.reduce import AllReduce
from trainer.reduce import Bucket as Flat
from trainer.run import log

ORDER = "DDP then keeps the order in which the model defines its parameters, and a first bucket would be sent last"
UNUSED = "what no rank has used is known to DDP alone"


class Bucket(Callback):
    """Small buckets start early but pay each collective's latency; one large bucket overlaps with nothing. The order of
    summation depends on it, so results equal plain training's to rounding.

    Args:
        mib: Size of a bucket in MiB; DDP's own default is 25, with a first bucket of 1. `auto`: the fastest in the
            rehearsal, of `sizes` and of one bucket for everything; a run that goes on keeps what was chosen.
        first_mib: Size of the first bucket, where it is another.
        mibs: Size of each bucket, in the order of reduction; the last is that of all the rest.
        late: Names or patterns of parameters that are reduced together, after all others.
    """

    role = Role.SHARD
    communicates = True
    sizes = (1.0, 4.0, 25.0, 100.0)  # MiB

    def __init__(
        self,
        mib: float | Literal["auto"] = 25.0,
        first_mib: float | None = None,
        mibs: list[float] | None = None,
        late: list[str] | None = None,
    ) -> None:
        for key, value in [("mib", mib), ("first_mib", first_mib), *(("mibs", value) for value in mibs or [])]:
            require(f"callbacks.bucket.{key}", None if value == "auto" else value, above=0, below=math.inf)
        for key, value in (("mibs", mibs), ("late", late)):
            if value == []:
                raise ConfigError(f"callbacks.bucket.{key}=[]: names nothing; give one at least, or null")
        if mibs and (mib != 25.0 or first_mib):
            other = f"first_mib={first_mib}" if first_mib else f"mib={mib}"
            raise ConfigError(f"callbacks.bucket.mibs={mibs}: has every size, so {other} says nothing; leave one out")
        self.mib: float | Literal["auto"] = mib
        self.first_mib, self.mibs, self.late = first_mib, mibs, late
        self.conflicts = {}
        if first_mib or mibs:
            key = "first_mib" if first_mib else "mibs"
            self.conflicts["find_unused_parameters"] = f"{ORDER}; set it to false or leave callbacks.bucket.{key} out"
        if late:
            off = "leave callbacks.bucket.late out"
            self.conflicts["overlap"] = f"it sends in an order of its own; {off}"
            self.conflicts["find_unused_parameters"] = self.conflicts["static_graph"] = f"{UNUSED}; {off}"

    def wrap_model(self, trainer, model: nn.Module) -> nn.Module:
        if self.late:
            Late(trainer, model, self.late)
        if self.mib != "auto":
            trainer.ddp |= self._layout(self.mib)
        elif chosen := recorded(trainer.plan.manifest, trainer.world):
            log.info("bucket: %.4g MiB, as the run began with", chosen)
            trainer.ddp |= self._layout(chosen)
        else:
            total = sum(p.nbytes for p in model.parameters() if p.requires_grad) / 2**20
            trainer.tries = [self._layout(mib) for mib in (*(mib for mib in self.sizes if mib < total), total)]
        return model

    def _layout(self, mib: float) -> dict[str, Any]:
        """Arguments of DDP, to which a list of sizes comes before the one size."""
        mibs = self.mibs or (self.first_mib and [self.first_mib, mib])
        if not mibs:
            return {"bucket_cap_mb": mib}
        if "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters:
            key = f"mibs={self.mibs}" if self.mibs else f"first_mib={self.first_mib}"
            raise ConfigError(f"callbacks.bucket.{key}: torch {torch.__version__} has one size for all; leave it out")
        return {"bucket_cap_mb": None if self.mibs else mib, "bucket_cap_mb_list": mibs}


def recorded(manifest: dict[str, Any], world: int) -> float | None:
    """The size of the run that goes on, on which its bits depend; other ranks have other links, and other bits."""
    return manifest["ddp"]["bucket_cap_mb"] if manifest and manifest["world"] == world else None


class Late:
    """Reduces the parameters that match `patterns` through the trainer's chain, after the backward pass.

    DDP is told to leave them out. Its own way, `delay_all_reduce_named_params`, goes around the chain and waits for
    nothing: with gloo the gradients still change after `backward` has returned.

    Raises:
        ConfigError: for a pattern without a parameter, and where none is left for DDP.
    """

    def __init__(self, trainer, model: nn.Module, patterns: list[str]) -> None:
        named = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        found: dict[Tensor, None] = {}
        for pattern in patterns:
            matching = [p for name, p in named.items() if name == pattern or fnmatchcase(name, pattern)]
            if not matching:
                key = f"callbacks.bucket.late={pattern}"
                raise ConfigError(f"{key}: no parameter that is trained has such a name; {nearest(pattern, named)}")
            found |= dict.fromkeys(matching)
        if len(found) == len(set(named.values())):
            raise ConfigError(f"callbacks.bucket.late={patterns}: is all that is trained; leave some to DDP")
        self.trainer, self.reduce = trainer, AllReduce(trainer.ranks.new_group())
        self.params, self.queued = found, False
        self.names: dict[Tensor, str] = {p: name for name, p in named.items()}
        ignored = [name for name, p in named.items() if p in found]  # a tied one under each of its names
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        for p in found:
            if trainer.world > 1:
                dist.broadcast(p.data, 0)  # as DDP does with its own
            p.register_post_accumulate_grad_hook(self._note)

    def _note(self, p: Tensor) -> None:
        """At the first of the step's last micro-batch."""
        model = self.trainer.model
        if not self.queued and model is not self.trainer.module and model.require_backward_grad_sync:
            self.queued = True
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._reduce))  # behind DDP's, which is there at the end: the chain is one at a time

    @torch.no_grad()
    def _reduce(self) -> None:
        self.queued = False
        if missing := [self.names[p] for p in self.params if p.grad is None]:
            raise RuntimeError(
                f"bucket: no gradient for {', '.join(missing)}; use every parameter in every loss, or leave it out of "
                "callbacks.bucket.late"
            )
        reduce = self.trainer.reduce or self.reduce
        for dtype in {p.dtype: None for p in self.params}:
            params = [p for p in self.params if p.dtype == dtype]
            bucket = Flat.of(params, self.trainer.step)
            flat = params[0].new_empty(sum(p.numel() for p in params))
            torch._foreach_copy_(bucket.gradients(flat), [p.grad for p in params])  # pyright: ignore[reportArgumentType] all are there
            for p, gradient in zip(params, bucket.gradients(reduce(flat, bucket)), strict=True):
                p.grad = gradient
