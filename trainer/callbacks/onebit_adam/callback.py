"""1-bit Adam: after a warm-up the variance is frozen, and the momentum is sent as signs."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import AdamW, Optimizer

from trainer.annotated import PositiveInt
from trainer.callback import Callback, Role
from trainer.callbacks.onebit_adam.cost import OneBitAdamCost
from trainer.callbacks.onebit_adam.optimizer import OneBit
from trainer.comm.codecs.base import Residuals, merge
from trainer.comm.ranks import share_buffers
from trainer.comm.reduce import AllReduce
from trainer.context import Context
from trainer.cost.setup import Cost
from trainer.cost.variant import Situation, Variant
from trainer.errors import ConfigError
from trainer.log import log

UNUSED = "only DDP knows which parameters no rank has used, and DDP ends with the warm-up"

WARMUP = 100  # steps


class OneBitAdam(Callback):
    """1-bit Adam (Tang et al. 2021, arXiv:2102.02888): AdamW during the warm-up; no gradients are reduced after it.

    After the warm-up the ranks' momenta, with their own gradients, are averaged as signs with error feedback in both
    directions. On another number of ranks, worker errors are averaged and server errors are split again. The next mean
    then contains the same part of them.
    """

    role = Role.OPTIMIZER
    also = (Role.REDUCE, Role.COMPRESS, Role.SYNC)  # after the warm-up nothing else is reduced
    exact = False
    communicates = True
    provides = frozenset({"defers"})
    conflicts = {
        "bf16_weights": "it steps weights itself, without stochastic rounding; use trainer.master_weights=true",
        "fp16": "ranks would skip different steps, and wait for each other; use trainer.precision=bf16",
        "find_unused_parameters": f"{UNUSED}; set trainer.ddp.find_unused_parameters=false or leave onebit_adam out",
        "static_graph": f"{UNUSED}; set trainer.ddp.static_graph=false or leave onebit_adam out",
    }

    def __init__(self, warmup_steps: PositiveInt = WARMUP) -> None:
        self.warmup_steps, self.restored_step = warmup_steps, 0
        self.errors = {"worker": Residuals(), "server": Residuals()}
        self.names: dict[Tensor, str] = {}  # names of the parameters, once they are known
        self.frozen: OneBit | None = None  # None during the warm-up

    @classmethod
    def variants(cls, at: Situation) -> Iterable[Variant]:
        """Return nothing before the end of the warm-up, because a trial would run plain AdamW."""
        return [Variant({})] if at.ranks > 1 and at.step >= WARMUP else []

    def cost(self) -> Cost:
        return OneBitAdamCost(codec_name="sign")

    def wrap_optimizer(self, trainer, optimizer: Optimizer) -> Any:
        self.adam, self.ends = OneBit(adamw(optimizer)), AllReduce(trainer.ranks.new_group())
        self.names = {p: name for name, p in trainer.module.named_parameters()}
        return self.adam

    def on_fit_start(self, trainer) -> None:
        log.info(
            "onebit_adam: train/grad_norm is not reported, since no gradients are reduced from step %d on",
            self.warmup_steps,
        )
        if trainer.step < self.warmup_steps and self.restored_step:
            raise ConfigError(
                f"callbacks.onebit_adam.warmup_steps={self.warmup_steps}: the checkpoint is of step {trainer.step}, "
                f"and its variance is frozen since step {self.restored_step}; set at most {trainer.step}"
            )
        if trainer.step >= self.warmup_steps:
            self._freeze(trainer, self.restored_step)

    def on_step_end(self, trainer) -> None:
        if trainer.step == self.warmup_steps:
            self._freeze(trainer, 0)
        if self.frozen:
            share_buffers(trainer.module, trainer.strategy.replicas, trainer.strategy.constant_buffers)  # as DDP does

    def _freeze(self, trainer: Context, frozen_step: int) -> None:
        """Freeze the variance, and call the model without DDP from now on, so that backward passes reduce nothing."""
        if not all(self.adam.state.get(p) for p in self.adam.params):
            raise ConfigError(
                f"callbacks.onebit_adam.warmup_steps={self.warmup_steps}: at step {trainer.step} AdamW has no variance "
                f"to freeze; set more than {trainer.step}, or resume from a checkpoint that has AdamW's state"
            )
        trainer.strategy.unwrap()
        self.adam.freeze(frozen_step, self.ends, **self.errors)
        self.frozen = self.adam

    def state_dict(self) -> dict[str, Any]:
        return {"frozen_step": self.frozen.frozen_step} if self.frozen else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored_step = state.get("frozen_step", 0)

    def rank_state_dict(self) -> dict[str, Any]:
        return {key: kept.state(self.names) for key, kept in self.errors.items()} if self.frozen else {}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        for key, kept in self.errors.items():
            kept.load(state[key], self.names)

    def merge_rank_states(self, states: Iterator[dict[str, Any]]) -> dict[str, Any]:
        return merge(states)


def adamw(optimizer: Optimizer) -> AdamW:
    """Return `optimizer` if it is an AdamW that 1-bit Adam can continue."""
    if not isinstance(optimizer, AdamW):
        raise ConfigError(
            f"optimizer={type(optimizer).__name__}: onebit_adam continues from AdamW's momentum and variance; "
            "use optimizer=adamw, or leave onebit_adam out"
        )
    for key in ("amsgrad", "maximize"):
        if any(group[key] for group in optimizer.param_groups):
            raise ConfigError(f"optimizer.{key}=true: onebit_adam has no such option; set optimizer.{key}=false")
    return optimizer
