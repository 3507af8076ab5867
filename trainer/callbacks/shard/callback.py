"""Shards optimizer state, gradients and parameters over the ranks: ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054)."""

from collections.abc import Callable, Iterable
from typing import Annotated, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.annotated import AtLeast
from trainer.callback import Callback, Role, Symptom
from trainer.callbacks.shard import stage3
from trainer.callbacks.shard.cost import OwnersCost, RowsCost
from trainer.callbacks.shard.fsdp import FSDP
from trainer.callbacks.shard.owners import Owners
from trainer.callbacks.shard.zero import ZeRO1, ZeRO2
from trainer.comm.mesh import line_of
from trainer.comm.reduce import AllReduce, Reduce
from trainer.cost.setup import Cost
from trainer.cost.variant import Situation, Variant
from trainer.data.batch import Step
from trainer.errors import ConfigError
from trainer.optim.probe import refuse_coupled
from trainer.parallel.forward_backward import ForwardBackward
from trainer.parallel.strategy import Strategy

OFF = "or use callbacks.shard.stage=1"
STEPS = "a rank steps only its own parameters, after all gradients of the step are reduced; leave one out"
WITHOUT_DDP = {
    "find_unused_parameters": "only DDP knows which parameters no rank has used, and stage 2 runs without DDP; "
    f"set trainer.ddp.find_unused_parameters=false, {OFF}",
    "static_graph": "only DDP knows which parameters are used twice, and stage 2 runs without DDP; "
    f"set trainer.ddp.static_graph=false, {OFF}",
    "gradient_as_bucket_view": "a view keeps its whole bucket in memory, and stage 2 frees buckets; "
    f"set trainer.ddp.gradient_as_bucket_view=null, {OFF}",
}


class Shard(Callback):
    """Shards the training state over the ranks.

    With stages 1 and 2, each parameter is stepped by one rank, bit-equal to plain training with any optimizer that
    steps each parameter independently. Stage 3 is torch's FSDP2, where each rank has some rows of each parameter, and
    is exact up to rounding.
    """

    role = Role.SHARD
    remedies = {Symptom.MEMORY: [{"stage": 1}, {"stage": 2}, {"stage": 3}]}
    family = ("stage",)
    communicates = True

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 1,
        blocks: list[str] | None = None,
        reshard: bool = True,
        hybrid: bool | Annotated[int, AtLeast(2)] = False,
        offload: bool = False,
    ) -> None:
        given = {"blocks": blocks is not None, "reshard": not reshard, "hybrid": bool(hybrid), "offload": offload}
        if stage < 3 and any(given.values()):
            key = next(key for key in given if given[key])
            raise ConfigError(
                f"callbacks.shard.{key}: has no effect with callbacks.shard.stage={stage}; set "
                f"callbacks.shard.stage=3, or leave {key} out"
            )
        self.stage, self.blocks, self.reshard, self.hybrid, self.offload = stage, blocks, reshard, hybrid, offload
        self.order: stage3.BlockOrder | None = None
        self.shares_with = frozenset({Role.SPLIT} if stage == 1 else ())
        self.provides = frozenset({"hierarchical"} if hybrid else ())
        self.conflicts = stage3.conflicts(offload) if stage == 3 else {"defers": STEPS}
        if stage == 2:
            self.conflicts |= WITHOUT_DDP

    @classmethod
    def variants(cls, at: Situation) -> Iterable[Variant]:
        knobs = [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "reshard": False}]
        hybrid = [{"stage": 3, "hybrid": True}] if at.two_levels else []
        return [Variant(each) for each in [*knobs, *hybrid]] if at.ranks > 1 else []

    def cost(self) -> Cost:
        if self.stage == 3:
            return RowsCost(reshard=self.reshard, hybrid=self.hybrid)
        return OwnersCost(gradients=self.stage == 2)

    def wrap_reduce(self, trainer, reduce: Reduce) -> Reduce:
        """Keep the group of all ranks. With `hybrid`, start the chain with the mean across groups."""
        assert isinstance(reduce, AllReduce)  # this is the first callback that wraps it
        self.mesh, self.across = line_of(reduce.group, trainer.device, "shard"), None
        if self.hybrid:
            self.mesh, self.across = stage3.two_levels(trainer, self.hybrid)
        return self.across or reduce

    def distribute(self, trainer, model: nn.Module) -> Strategy:
        if self.stage == 1:  # DDP reduces in C++
            return ZeRO1(trainer, model, None if isinstance(trainer.reduce, AllReduce) else trainer.reduce)
        if self.stage == 2:
            return ZeRO2(trainer, model)
        strategy = stage3.fully_shard(
            trainer, model, self.mesh, self.across, self.blocks, reshard=self.reshard, offload=self.offload
        )
        # A compiled block would be recompiled for each number of this hook.
        if not any(Role.COMPILE in (each.role, *each.also) for each in trainer.callbacks.values()):
            self.order = stage3.BlockOrder([model.get_submodule(name) for name in strategy.blocks])
        return strategy

    def wrap_optimizer(self, trainer, optimizer: Optimizer) -> Optimizer:
        refuse_coupled(optimizer, "callbacks.shard")
        strategy = trainer.strategy
        if isinstance(strategy, ZeRO1):
            strategy.owners.attach(optimizer)
        elif self.stage == 1 and strategy.replicas:  # the replicas of a pipeline's stage
            owners = Owners(strategy.parameters, strategy.replicas)
            owners.attach(optimizer)
            strategy.owned = owners.own
        return optimizer

    def wrap_forward_backward(self, trainer, run: ForwardBackward) -> ForwardBackward:
        if self.order is None:
            return run
        order = self.order

        def passes(data: Step, total: Callable[[], int]) -> list[Tensor]:
            losses = run(data, total)
            order.compare(trainer)
            return losses

        return passes

    def on_flush(self, trainer) -> None:
        """Broadcast rank 0's buffers, which validation and checkpoints read. Other strategies do this themselves."""
        if isinstance(trainer.strategy, FSDP):
            trainer.strategy.share_buffers(*dict.fromkeys((trainer.module, trainer.eval_model)))

    def on_fit_end(self, trainer) -> None:
        for hook in self.order.hooks if self.order else ():
            hook.remove()
        trainer.strategy.unwrap()  # parameter hooks would keep the trainer alive, which Python's collector can't see
