"""Handles weights that differ between ranks: fragments that synchronise together, averages, means of saved states."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from trainer.checkpoint.serialize import load_optimizer_state, optimizer_state
from trainer.comm.bucket import Bucket, flatten
from trainer.comm.codecs.base import Residuals
from trainer.comm.reduce import Background, Reduce
from trainer.context import Context
from trainer.errors import ConfigError
from trainer.parallel.evenly import evenly


@dataclass
class OuterOptimizer:
    """The outer SGD with Nesterov momentum, which moves the common weights along a pseudo-gradient.

    A rate of 1 with a momentum of 0 gives the average. `mix` is the fraction of a rank's own weights in its new ones.
    """

    lr: float
    momentum: float
    mix: float
    common: Residuals = field(default_factory=Residuals)
    velocity: Residuals = field(default_factory=Residuals)
    arrived: Residuals = field(default_factory=Residuals)

    @classmethod
    def of(cls, kind: str, lr: float | None, momentum: float | None, mix: float | None, delay: int) -> "OuterOptimizer":
        """Create the optimizer that local_sgd's knobs describe; None means the default. Refuse knobs without effect."""
        for key, value, used, here, fix in (
            ("outer_lr", lr, kind == "nesterov", "outer=average", "outer=nesterov"),
            ("outer_momentum", momentum, kind == "nesterov", "outer=average", "outer=nesterov"),
            ("mix", mix, delay > 0, "delay=0", "delay=1 or more"),
        ):
            if value is not None and not used:
                reason = f"has no effect with {here}; set callbacks.local_sgd.{fix}, or leave {key} out"
                raise ConfigError(f"callbacks.local_sgd.{key}={value}: {reason}")
        share = (0.5 if mix is None else mix) if delay else 0.0
        if kind == "average":
            return cls(1.0, 0.0, share)
        return cls(0.7 if lr is None else lr, 0.9 if momentum is None else momentum, share)


class Fragment:
    """Parameters that synchronise at the same steps, their common weights, and the reduction in flight."""

    def __init__(self, params: list[Tensor], outer: OuterOptimizer, reduce: Reduce, background: Background) -> None:
        self.params, self.outer, self.reduce, self.background = params, outer, reduce, background
        self.bucket = Bucket.of(params, 0, "weights")
        self.flight: Future[Tensor] | None = None
        self.due = -1
        self.common = outer.common.of(self.bucket, flatten(params))

    def begin(self) -> None:
        self.common.copy_(flatten(self.params))

    def send(self, step: int, due: int) -> None:
        drift = self.common - flatten(self.params)
        self.flight = self.background.submit(self.reduce, drift, Bucket.of(self.params, step, "weights"))
        self.due = due

    def land(self, step: int) -> None:
        """Apply the mean of the sent weights, if it is due."""
        if self.flight is None or self.due != step:
            return
        outer, mean = self.outer, self.flight.wait()
        if outer.momentum:
            velocity = outer.velocity.of(self.bucket, mean)
            velocity.mul_(outer.momentum).add_(mean)
            mean = mean.add(velocity, alpha=outer.momentum)  # Nesterov momentum as in torch's SGD
        self.common.add_(mean, alpha=-outer.lr)
        for p, common in zip(self.params, self.bucket.split(self.common), strict=True):
            p.lerp_(common.to(p.dtype), 1.0 - outer.mix)
        self.flight = None

    def wait(self) -> None:
        if self.flight:
            self.flight.wait()

    def arrive(self) -> int:
        """Store the mean in flight in `arrived`, to be saved; return the step that will apply it, or -1."""
        if self.flight is None:
            return -1
        self.outer.arrived.of(self.bucket, self.common).copy_(self.flight.wait())
        return self.due

    def resume(self, due: int) -> None:
        if due >= 0:
            self.flight, self.due = Future(), due
            self.flight.set_result(self.outer.arrived.of(self.bucket, self.common).clone())


def partition(params: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    return [[params[i] for i in part] for part in evenly([p.numel() for p in params], count)]


def buffers(module: nn.Module) -> list[Tensor]:
    return [buffer for buffer in module.buffers() if buffer.is_floating_point()]


def average(reduce: Reduce, ranks_own: Iterable[Tensor], means: Iterable[Tensor]) -> None:
    """Write the mean over ranks of each tensor into `means`. A collective."""
    if tensors := list(ranks_own):
        flat = reduce(flatten(tensors), Bucket((), 0))
        for mean, part in zip(means, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            mean.copy_(part.view_as(mean))


def average_model(reduce: Reduce, module: nn.Module, mean: nn.Module) -> None:
    """Write the mean over ranks of `module` into `mean`. Buffers that are not floating-point stay this rank's."""
    for own, common in zip(module.buffers(), mean.buffers(), strict=True):
        common.copy_(own)
    for part in (nn.Module.parameters, buffers):
        average(reduce, part(module), part(mean))


def own_state(trainer: Context) -> dict[str, Any]:
    """Return this rank's weights and moments, for `load_own`."""
    optimizer = optimizer_state(trainer.optimizer, trainer.module)
    return {"model": trainer.module.state_dict(), "optimizer": optimizer, "kind": type(trainer.optimizer).__name__}


def load_own(trainer: Context, state: dict[str, Any]) -> None:
    """Load weights and moments. Moments of another optimizer, which `trainer.accept` allows, are skipped."""
    trainer.module.load_state_dict(state["model"])
    if state["kind"] == type(trainer.optimizer).__name__:
        load_optimizer_state(trainer.optimizer, trainer.module, state["optimizer"])


def refuse_quantised(state: dict[str, dict[str, Any]]) -> None:
    for name, own in state.items():
        if any(isinstance(value, Tensor) and value.dtype == torch.uint8 for value in own.values()):
            raise ConfigError(
                f"trainer.resume: local_sgd can't average the ranks' 8-bit moments of {name}; resume on as many ranks "
                "as before, or take the weights alone: trainer.init_from"
            )


def mean_of(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of each floating-point tensor in nested dicts; other values are the first state's.

    Only one state is in memory at a time, in addition to the sums, which are float32 or wider.
    """
    sums, dtypes, ranks = {}, {}, 0
    for state in states:
        refuse_quantised(state.get("optimizer", {}))
        if ranks == 0:
            dtypes = map_floats(lambda value: value.dtype, state)
            sums = map_floats(lambda v: torch.zeros_like(v, dtype=torch.promote_types(v.dtype, torch.float32)), state)
        sums = map_floats(Tensor.add_, sums, state)
        ranks += 1
        del state  # free it before the next one is read
    return map_floats(lambda total, dtype: total.div_(ranks).to(dtype), sums, dtypes)


def map_floats(change: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Return nested dicts with `change` applied to each floating-point tensor in `first` and its peers in `others`."""
    if isinstance(first, dict):
        return {key: map_floats(change, value, *(other[key] for other in others)) for key, value in first.items()}
    return change(first, *others) if isinstance(first, Tensor) and first.is_floating_point() else first
