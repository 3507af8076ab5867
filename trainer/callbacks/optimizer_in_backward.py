"""Steps each parameter in the backward pass, as soon as its gradient is there, and frees the gradient."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.callback import Callback, Role, Symptom
from trainer.comm.bucket import Bucket
from trainer.comm.ranks import share_buffers
from trainer.comm.reduce import Background, Reduce, Reduced
from trainer.cost.buckets import lay_out
from trainer.cost.setup import Cost, Held, Setup
from trainer.data.batch import Step
from trainer.errors import ConfigError
from trainer.log import log
from trainer.optim.partial_step import OptimizerProxy, PartialStep
from trainer.optim.probe import refuse_coupled
from trainer.parallel.forward_backward import ForwardBackward
from trainer.parallel.strategy import SingleDevice

IN_MEMORY = 4  # most buckets whose gradients are in memory
MOST_SENT = 2  # most buckets in flight: one is reduced while the backward pass fills the next


class OptimizerInBackward(Callback):
    """Steps each parameter in the backward pass, and frees its gradient (Lv et al. 2023, arXiv:2306.09782, LOMO).

    On several ranks, a bucket of DDP's layout is stepped when it is reduced, without DDP. The weights are plain DDP's,
    bit for bit, and complete at the end of each step.
    """

    role = Role.OPTIMIZER
    remedies = {Symptom.MEMORY: [{}]}
    provides = frozenset({"defers", "own_order"})
    conflicts = {
        Role.SYNC: "no gradient is reduced between synchronisations; leave one out",
        "clip_value": "each gradient is used as soon as it is computed; "
        "set trainer.clip_value=null or leave optimizer_in_backward out",
        "clip": "the global norm is known only after all gradients; "
        "set trainer.clip_norm=null or leave optimizer_in_backward out",
        "fp16": "loss scaling must see all gradients first; "
        "use trainer.precision=bf16 or leave optimizer_in_backward out",
        "find_unused_parameters": "only DDP knows which parameters no rank has used; "
        "set trainer.ddp.find_unused_parameters=false or leave optimizer_in_backward out",
        "static_graph": "only DDP knows which parameters are used twice; "
        "set trainer.ddp.static_graph=false or leave optimizer_in_backward out",
    }

    def __init__(self) -> None:
        self.reduce: Reduce | None = None  # None on one rank
        self.rehearsed = False
        self.done: set[Tensor] = set()  # parameters whose gradient in this step has been used
        self.sent = 0  # buckets sent in this step
        self.flying = deque[tuple[Bucket, Reduced]]()

    def cost(self) -> Cost:
        return FreedGradients()

    def wrap_reduce(self, trainer, reduce: Reduce) -> Reduce:
        self.reduce, self.background = reduce, Background(trainer.device)
        return reduce

    def wrap_optimizer(self, trainer, optimizer: Optimizer) -> Any:
        if not isinstance(trainer.strategy, SingleDevice):
            kind = type(trainer.strategy).__name__
            raise ConfigError(
                f"callbacks.optimizer_in_backward: needs whole gradients on each rank, and {kind} lays them out; "
                "leave one out"
            )
        refuse_coupled(optimizer, "callbacks.optimizer_in_backward", by_parameter=True)
        self.trainer, self.partial = trainer, PartialStep(optimizer)
        return OptimizerProxy(optimizer, self._end_step)

    def wrap_forward_backward(self, trainer, run: ForwardBackward) -> ForwardBackward:
        def begin_step(data: Step, total: Callable[[], int]) -> list[Tensor]:
            if self.rehearsed:
                self.partial.note()
                share_buffers(trainer.module, trainer.strategy.replicas, trainer.strategy.constant_buffers)  # as DDP
            return run(data, total)

        return begin_step

    def on_fit_start(self, trainer) -> None:
        log.info("optimizer_in_backward: train/grad_norm is not reported, since no moment has all gradients")
        self.layout: list[list[Tensor]] = [[trainer.parameters[i] for i in bucket] for bucket in trainer.buckets]
        trainer.strategy.unwrap()
        for p in trainer.parameters:  # these hooks would keep the trainer alive, which Python's collector can't see
            trainer.undo.callback(p.register_post_accumulate_grad_hook(self._take).remove)
        self.rehearsed = True

    @torch.no_grad()
    def _take(self, p: Tensor) -> None:
        """Use a complete gradient from the backward pass of the step's last micro-batch."""
        if not self.trainer.strategy.syncing:
            return
        if p in self.done:
            raise ConfigError(
                f"optimizer_in_backward: {self._names([p])} has a second gradient in a step; use it in one backward "
                "pass, without reentrant checkpoints, or leave optimizer_in_backward out"
            )
        self.done.add(p)
        if self.reduce is None:
            assert p.grad is not None
            self.partial.step({p: p.grad})
            return
        while self.sent < len(self.layout) and self.done.issuperset(self.layout[self.sent]):
            self._send(self.layout[self.sent], self.reduce)
            self.sent += 1

    def _send(self, params: list[Tensor], reduce: Reduce) -> None:
        while len(self.flying) == MOST_SENT or (self.flying and self.flying[0][1].arrived()):
            self._land()
        bucket = Bucket.of(params, self.trainer.step)
        flat = params[0].new_empty(bucket.numel())
        bucket.take_gradients(flat)
        self.flying.append((bucket, self.background.submit(reduce, flat, bucket)))

    def _land(self) -> None:
        bucket, mean = self.flying.popleft()
        params = [piece.param for piece in bucket.pieces]
        self.partial.step(dict(zip(params, bucket.gradients(mean.wait()), strict=True)))

    @torch.no_grad()
    def _end_step(self) -> None:
        """Step everything in flight; on one rank, also parameters that the last micro-batch did not use."""
        if self.reduce is None:
            late: dict[Tensor, Tensor] = {p: p.grad for p in self.trainer.parameters if p.grad is not None}
            if late:
                self.partial.step(late)
        elif self.sent < len(self.layout):
            missing = [p for p in self.trainer.parameters if p not in self.done]
            raise ConfigError(
                f"optimizer_in_backward: no gradient for {self._names(missing)} in the last micro-batch of a step; use "
                "every parameter in every loss, or leave optimizer_in_backward out"
            )
        while self.flying:
            self._land()
        self.done.clear()
        self.sent = 0

    def _names(self, params: Sequence[Tensor]) -> str:
        names: dict[Tensor, str] = {p: name for name, p in self.trainer.module.named_parameters()}
        return ", ".join(names[p] for p in params)


class FreedGradients(Cost):
    """There are no DDP buckets. With one pass per step, only a few buckets' gradients exist at a time."""

    def hold(self, setup: Setup, held: Held) -> Held:
        if setup.passes > 1:
            return held._replace(buckets=0.0)
        most = IN_MEMORY * 4 * max(bucket.elements for bucket in lay_out(setup))
        return held._replace(gradients=min(setup.gradient_bytes, most), buckets=0.0)
