"""Local SGD and DiLoCo: each rank steps alone, and every few steps the ranks synchronise their weights."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.annotated import Beta, NonNegativeInt, PositiveFloat, PositiveInt
from trainer.callback import Callback, Role
from trainer.callbacks.local_sgd.averaging import (
    Fragment,
    OuterOptimizer,
    average,
    average_model,
    buffers,
    load_own,
    mean_of,
    own_state,
    partition,
)
from trainer.callbacks.local_sgd.cost import LocalSGDCost
from trainer.comm.reduce import AllReduce, Background, Reduce
from trainer.context import Context
from trainer.cost.setup import Cost
from trainer.cost.variant import Situation, Variant
from trainer.errors import ConfigError, require
from trainer.log import log
from trainer.parallel.strategy import copied


class LocalSGD(Callback):
    """Lets each rank step alone between synchronisations of the weights.

    Its pseudo-gradient, each rank's distance from the common weights, is reduced through the same chain as gradients.
    Papers: Stich 2018, arXiv:1805.09767 (`average`), with a warm-up Lin et al. 2018, arXiv:1808.07217. DiLoCo:
    Douillard et al. 2023, arXiv:2311.08105 (`nesterov`), streaming: Douillard et al. 2025, arXiv:2501.18512.
    Validation, checkpoints and export use the mean of the ranks' weights.
    """

    role = Role.SYNC
    family = ("every",)
    exact = False
    communicates = True
    provides = frozenset({"defers"})
    conflicts = {
        "own_order": "no gradient is reduced between synchronisations, and local_sgd.delay hides these; leave one out",
        Role.AVERAGE: "the average would be of one rank's own weights; leave the average out: local_sgd has its own",
        "bf16_weights": "an average of weights would be rounded to nearest, which drops small updates; use "
        "trainer.master_weights=true",
        "sync_batch_norm": "each forward pass would wait for all ranks, and local_sgd exists to avoid such waits; "
        "set trainer.sync_batch_norm=false or leave local_sgd out",
        "fp16": "each rank would have a loss scale of its own; use trainer.precision=bf16",
    }

    def __init__(
        self,
        every: PositiveInt = 8,
        warmup_steps: NonNegativeInt = 0,
        outer: Literal["average", "nesterov"] = "average",
        outer_lr: PositiveFloat | None = None,
        outer_momentum: Beta | None = None,
        fragments: PositiveInt = 1,
        delay: NonNegativeInt = 0,
        mix: Beta | None = None,
    ) -> None:
        require("callbacks.local_sgd.fragments", fragments, below=every + 1)
        require("callbacks.local_sgd.delay", delay, below=every)
        self.every, self.warmup_steps, self.delay, self.count = every, warmup_steps, delay, fragments
        self.outer = OuterOptimizer.of(outer, outer_lr, outer_momentum, mix, delay)
        self.kept = {"common": self.outer.common, "velocity": self.outer.velocity, "arrived": self.outer.arrived}
        self.fragments: list[Fragment] = []  # empty during the warm-up
        self.averaged_step = -1  # the step whose mean weights `global_model` has
        self.names: dict[Tensor, str] = {}
        self.due: list[int] = []
        self.own: dict[str, Any] = {}

    @classmethod
    def variants(cls, at: Situation) -> Iterable[Variant]:
        knobs = [{"every": 4}, {"every": 16}, {"every": 16, "delay": 8}] if at.ranks > 1 else []
        return [Variant(each, others) for each in knobs for others in ({}, {"grad_compress": {"codec": "int8"}})]

    def cost(self) -> Cost:
        copies = (3 if self.outer.momentum else 2) + bool(self.delay)
        return LocalSGDCost(every=self.every, delay=self.delay, fragments=self.count, held_copies=copies)

    def wrap_reduce(self, trainer, reduce: Reduce) -> Reduce:
        self.trainer, self.reduce, self.background = trainer, reduce, Background(trainer.device)
        self.plain = AllReduce(trainer.ranks.new_group())
        self.names = {p: name for name, p in trainer.module.named_parameters()}
        return reduce

    def on_fit_start(self, trainer) -> None:
        log.info("local_sgd: train/grad_norm is not reported, since no gradients are reduced after the warm-up")
        if trainer.step >= self.warmup_steps:
            self._end_warmup(trainer)
        elif self.own:
            key = f"callbacks.local_sgd.warmup_steps={self.warmup_steps}"
            reason = f"the checkpoint of step {trainer.step} was written after the warm-up"
            raise ConfigError(f"{key}: {reason}; set at most {trainer.step}")

    def _end_warmup(self, trainer: Context) -> None:
        """Call the model without DDP from now on, so that the backward pass reduces nothing."""
        if trainer.options.check_replicas_every:
            log.info("local_sgd: ranks have different weights from now on; trainer.check_replicas_every does nothing")
        trainer.global_model = trainer.eval_model = copied(trainer.module).requires_grad_(False)
        if self.own:
            load_own(trainer, self.own)
            self.own = {}
        trainer.strategy.unwrap()
        for params in partition(trainer.parameters, self.count):
            self.fragments.append(Fragment(params, self.outer, self.reduce, self.background))
        if len(self.due) not in (0, len(self.fragments)):
            key = f"callbacks.local_sgd.fragments={self.count}"
            raise ConfigError(f"{key}: the checkpoint has {len(self.due)} fragments; set fragments={len(self.due)}")
        for number, fragment in enumerate(self.fragments):
            fragment.resume(self.due[number]) if self.due else fragment.begin()
        self.outer.arrived.load({}, self.names)

    @torch.no_grad()
    def on_step_end(self, trainer) -> None:
        done = trainer.step - self.warmup_steps
        if not self.fragments and done == 0:
            return self._end_warmup(trainer)
        for number, fragment in enumerate(self.fragments, start=1):
            fragment.land(trainer.step)
            if done % self.every == number * self.every // len(self.fragments) % self.every:
                fragment.send(trainer.step, trainer.step + self.delay)
                fragment.land(trainer.step)
        if self.fragments and done % self.every == 0:
            average(self.plain, buffers(trainer.module), buffers(trainer.module))

    @torch.no_grad()
    def on_flush(self, trainer) -> None:
        for fragment in self.fragments:
            fragment.wait()  # else a codec's state would be saved while the codec changes it
        if not self.fragments or self.averaged_step == trainer.step:
            return
        average_model(self.plain, trainer.module, trainer.global_model)
        self.averaged_step = trainer.step

    def on_fit_end(self, trainer) -> None:
        if self.averaged_step == trainer.step:
            trainer.module.load_state_dict(trainer.global_model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        if not self.fragments:
            return {}
        due = [fragment.arrive() for fragment in self.fragments]
        state = {"due": due, **{key: kept.state(self.names) for key, kept in self.kept.items()}}
        self.outer.arrived.load({}, self.names)  # no longer needed, because the state contains it
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.due = state.get("due", [])
        for key, kept in self.kept.items():
            kept.load(state.get(key, {}), self.names)

    def rank_state_dict(self) -> dict[str, Any]:
        return own_state(self.trainer) if self.fragments else {}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        self.own = state

    def merge_rank_states(self, states: Iterator[dict[str, Any]]) -> dict[str, Any]:
        return mean_of(states)
