"""Sets the size of the buckets in which DDP reduces gradients (Li et al. 2020, arXiv:2006.15704)."""

import inspect
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.annotated import PositiveFloat
from trainer.callback import Callback, Role
from trainer.callbacks.bucket.delayed import DelayedParameters
from trainer.comm.ranks import Ranks
from trainer.cost.buckets import DEFAULT_MIB
from trainer.cost.setup import Cost
from trainer.errors import ConfigError
from trainer.log import log
from trainer.parallel.ddp import DDP
from trainer.parallel.warmup import time_pass

TIMED = 5  # passes of each layout that `auto` tries
ORDER = "DDP then keeps the order in which the model defines its parameters, and sends the first bucket last"


class Bucket(Callback):
    """Sets the size of DDP's buckets. It determines the order of summation, so results are exact up to rounding."""

    role = Role.SHARD
    communicates = True
    sizes = (1.0, 4.0, 25.0, 100.0)  # MiB

    def __init__(
        self,
        mib: PositiveFloat | Literal["auto"] = 25.0,
        first_mib: PositiveFloat | None = None,
        mibs: list[PositiveFloat] | None = None,
        delayed: list[str] | None = None,
    ) -> None:
        for key, value in (("mibs", mibs), ("delayed", delayed)):
            if value == []:
                raise ConfigError(f"callbacks.bucket.{key}=[]: is empty; give at least one, or null")
        if mibs and (mib != 25.0 or first_mib):
            other = f"first_mib={first_mib}" if first_mib else f"mib={mib}"
            reason = f"gives the size of every bucket, so {other} has no effect"
            raise ConfigError(f"callbacks.bucket.mibs={mibs}: {reason}; leave one out")
        self.mib: float | Literal["auto"] = mib
        self.first_mib, self.mibs, self.delayed = first_mib, mibs, delayed
        self.tries = list[dict[str, Any]]()  # arguments of DDP, for `auto` to choose from
        self.conflicts = refused = dict[Any, str]()
        if first_mib or mibs:
            key = "first_mib" if first_mib else "mibs"
            off = f"set trainer.ddp.find_unused_parameters=false or leave callbacks.bucket.{key} out"
            refused["find_unused_parameters"] = f"{ORDER}; {off}"
        if delayed:
            off = "leave callbacks.bucket.delayed out"
            refused["own_order"] = f"the buckets are sent without DDP, and delayed needs DDP's order; {off}"
            for key in ("find_unused_parameters", "static_graph"):
                refused[key] = f"only DDP knows which parameters no rank has used; set trainer.ddp.{key}=false or {off}"

    def cost(self) -> Cost:
        size = DEFAULT_MIB if self.mib == "auto" else self.mib
        return Cost(bucket_mibs=tuple(self.mibs or (self.first_mib or size, size)))

    def wrap_model(self, trainer, model: nn.Module) -> nn.Module:
        if self.delayed:
            self.after = DelayedParameters(trainer, model, self.delayed)
        if self.mib != "auto":
            trainer.ddp |= self._layout(self.mib)
        elif chosen := recorded(trainer.plan.manifest, trainer.world):
            log.info("bucket: buckets of %.4g MiB, the size in the checkpoint", chosen)
            trainer.ddp |= self._layout(chosen)
        else:
            total = sum(p.nbytes for p in model.parameters() if p.requires_grad) / 2**20
            self.tries = [self._layout(mib) for mib in (*(mib for mib in self.sizes if mib < total), total)]
        return model

    def rehearse(self, trainer, run_pass: Callable[[Any], None], batch: Any) -> None:
        if self.tries:
            assert isinstance(trainer.strategy, DDP)  # no other callback of this role lays the gradients out
            again = partial(run_pass, batch)
            trainer.strategy.lay_out(fastest(trainer.strategy, trainer.ranks, self.tries, again))
            trainer.strategy.warm_up(again)

    def on_step_end(self, trainer) -> None:
        if self.delayed:
            self.after.check()

    def _layout(self, mib: float) -> dict[str, Any]:
        """Return the arguments of DDP, in which a list of sizes precedes the one size."""
        mibs = self.mibs or (self.first_mib and [self.first_mib, mib])
        if not mibs:
            return {"bucket_cap_mb": mib}
        if "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters:
            key = f"mibs={self.mibs}" if self.mibs else f"first_mib={self.first_mib}"
            reason = f"torch {torch.__version__} has one size for all buckets"
            raise ConfigError(f"callbacks.bucket.{key}: {reason}; leave this setting out")
        return {"bucket_cap_mb": None if self.mibs else mib, "bucket_cap_mb_list": mibs}


def fastest(strategy: DDP, ranks: Ranks, tries: list[dict[str, Any]], run_pass: Callable[[], None]) -> dict[str, Any]:
    """Return the arguments with the smallest median over passes of the slowest rank's time. A collective."""
    layouts: list[list[list[int]]] = []
    measured: list[tuple[float, dict[str, Any]]] = []
    for arguments in tries:
        strategy.lay_out(arguments)
        strategy.warm_up(run_pass)
        layout = strategy.buckets()
        if layout not in layouts or not layout:  # empty with find_unused_parameters
            layouts.append(layout)
            times = ranks.gather([time_pass(run_pass, ranks) for _ in range(TIMED)])
            measured.append((median(map(max, zip(*times, strict=True))), arguments))
    _, chosen = min(measured, key=lambda one: one[0])
    each = ", ".join(f"{s * 1000:.1f} ms at {arguments['bucket_cap_mb']:.4g} MiB" for s, arguments in measured)
    log.info("rehearsal: a pass takes %s: the run has buckets of %.4g MiB", each, chosen["bucket_cap_mb"])
    return chosen


def recorded(manifest: dict[str, Any], world: int) -> float | None:
    """Return the checkpoint's bucket size, on which bits depend. Another number of ranks has other links and bits."""
    return manifest["ddp"]["bucket_cap_mb"] if manifest and manifest["world"] == world else None
