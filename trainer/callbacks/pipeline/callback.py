"""Runs the model as a pipeline: each rank has some of the blocks, and micro-batches pass from rank to rank."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from torch import nn
from torch.utils.data import default_collate

from trainer.annotated import AtLeast, PositiveFloat, PositiveInt, fits
from trainer.callback import Callback, Role, name_of
from trainer.callbacks.pipeline.balance import TWICE, Fits, balance
from trainer.callbacks.pipeline.cost import SPLIT, SPLITTING, PipelineCost
from trainer.callbacks.pipeline.memory import refuse, stage_memory
from trainer.callbacks.pipeline.partition import cut_by_time, max_in_flight, memory_limit
from trainer.callbacks.pipeline.pipedream import PipeDream, open_links
from trainer.callbacks.pipeline.profile_blocks import Trial, try_whole
from trainer.callbacks.pipeline.stages import KEY, check_blocks, drop_others
from trainer.callbacks.pipeline.strategy import Pipeline, pipeline_mesh
from trainer.comm.reduce import AllReduce, Reduce
from trainer.context import Context
from trainer.cost.setup import Cost
from trainer.cost.variant import Situation, Variant
from trainer.data.batch import Split
from trainer.data.loader import Loader
from trainer.errors import ConfigError
from trainer.log import log
from trainer.metrics.named_losses import NamedLosses
from trainer.parallel.blocks import find_blocks
from trainer.parallel.forward_backward import Accumulate, ForwardBackward
from trainer.parallel.layout import Layout, holders, part_sums

ASYNC = "pipedream_2bw"


class PipelineParallel(Callback):
    """Cuts the model between its blocks into stages (Huang et al. 2018, arXiv:1811.06965).

    The ranks form a mesh of `stages` x replicas: rank = stage * replicas + replica. Without dropout, weights and losses
    are bit-equal to the unsplit model's. Only `pipedream_2bw` is not exact: a step applies the gradient of the previous
    batch.
    """

    role = Role.SPLIT
    also = (Role.SHARD,)
    family = ("schedule",)
    conflicts = {
        Role.OPTIMIZER: "a rank has the parameters of its stage only; leave one out",
        Role.SYNC: "the stages of a pipeline exchange data in each step; leave one out",
        Role.BATCH: "the schedule needs the same number of micro-batches on each rank; leave one out",
        Role.REDUCE: "gradients are reduced over the replicas of a stage, not over all ranks; leave one out",
        Role.COMPILE: "a stage ends the model's forward pass early, from within the model; leave one out",
        "bf16_weights": "a stage's loss is compared with the whole model's, which is measured with float32 weights; "
        "use trainer.master_weights=true",
        "fp8": "a stage's loss is compared with the whole model's, which is measured before layers are in FP8; use "
        "trainer.precision=bf16",
        "fp16": "each stage would scale its loss by its own overflows; use trainer.precision=bf16",
        "sync_batch_norm": "BatchNorm would wait for all ranks, while each stage waits for the stage before it; "
        "set trainer.sync_batch_norm=false or leave pipeline out",
        "find_unused_parameters": "there is no DDP that looks for them; set trainer.ddp.find_unused_parameters=false",
        "static_graph": "there is no DDP that keeps the graph; set trainer.ddp.static_graph=false",
    }

    def __init__(
        self,
        stages: Annotated[int, AtLeast(2)] = 2,
        schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "pipedream_2bw"] = "1f1b",
        cut: list[int] | Literal["auto"] = "auto",
        memory_gib: PositiveFloat | None = None,
        run_ahead: PositiveInt = 1,
    ) -> None:
        self.exact = schedule != ASYNC
        # In `ASYNC`, a step applies the previous batch's gradients.
        self.provides = frozenset() if self.exact else frozenset({"defers"})
        if run_ahead > 1 and schedule != ASYNC:
            raise ConfigError(
                f"{KEY}.run_ahead={run_ahead}: is for {KEY}.schedule={ASYNC}, and schedule={schedule}; set it to 1"
            )
        self.stages, self.schedule, self.cut = stages, schedule, cut
        self.memory_gib, self.run_ahead = memory_gib, run_ahead
        self.virtual = stages * (2 if schedule in TWICE else 1)

    @classmethod
    def variants(cls, at: Situation) -> Iterable[Variant]:
        """Return pipelines of 2 ranks, 4 ranks and so on, with and without optimizer state sharded over the replicas.

        GPipe and interleaved stages are left out, because they lie between `1f1b` and `zero_bubble`.
        """
        for stages in (2**n for n in range(1, at.ranks.bit_length()) if at.ranks % 2**n == 0):
            for schedule in ("1f1b", "zero_bubble", ASYNC):
                if stages * (2 if schedule in TWICE else 1) > at.blocks:
                    continue
                yield Variant({"stages": stages, "schedule": schedule})
                if stages < at.ranks:
                    yield Variant({"stages": stages, "schedule": schedule}, {"shard": {"stage": 1}})

    def cost(self) -> Cost:
        cut = None if isinstance(self.cut, str) else tuple(self.cut)
        factor = SPLIT if self.schedule in SPLITTING else 1.0
        return PipelineCost(
            stages=self.stages, backward_factor=factor, schedule=self.schedule, cut=cut, run_ahead=self.run_ahead
        )

    def build_model(self, trainer, build: Callable[[], nn.Module]) -> nn.Module:
        if trainer.device.type == "cuda" and trainer.ranks.backend == "gloo":
            raise ConfigError(f"trainer.backend=gloo: sends no tensor of a GPU, and {KEY} has to; use nccl")
        model = build()
        blocks = find_blocks(trainer.recipe, model, None, KEY)
        check_blocks(blocks, self.virtual)
        self.mesh = pipeline_mesh(trainer.ranks, self.stages)
        self.replicas = self.mesh.sizes.get("data", 1)
        starts = None if isinstance(self.cut, str) else self._checked(self.cut, len(blocks))
        resumed = self._resumed(trainer, len(blocks))
        self.trial = None if resumed else self._try(trainer, model, blocks)
        starts = starts or resumed or self._cut(trainer, model, blocks)
        self.layout = Layout(starts, len(blocks), self.stages, self.schedule == "zbv")
        self.holders = holders(model, blocks, self.layout)
        self._refuse_unlike(model)
        own = set(self.layout.of(self.mesh.place["stage"]))
        log.info(
            "pipeline: %d stages of %d blocks begin at blocks %s; %d replica(s)",
            self.virtual, len(blocks), ", ".join(map(str, starts)), self.replicas,
        )  # fmt: skip
        drop_others(model, {name for name, stages in self.holders.items() if own & set(stages)}, trainer.device)
        return model

    def wrap_reduce(self, trainer, reduce: Reduce) -> Reduce:
        return AllReduce(self.mesh.groups["data"]) if self.replicas > 1 else reduce

    def distribute(self, trainer, model: nn.Module) -> Pipeline:
        accumulate = trainer.plan.accumulate
        needed = {"1f1b": self.stages, ASYNC: self.run_ahead * (self.stages - 1)}.get(self.schedule, 1)
        if accumulate < needed:
            ahead = f", run_ahead={self.run_ahead}" if self.run_ahead > 1 else ""
            raise ConfigError(
                f"{KEY}.schedule={self.schedule}{ahead}: needs accumulate={needed} or more for {self.stages} stages, "
                f"and accumulate={accumulate}; raise accumulate, or use {KEY}.schedule=gpipe"
            )
        idle = [name for name, other in trainer.callbacks.items() if other.communicates]
        if idle and self.replicas == 1:
            log.info("pipeline: one replica of each stage, nothing to reduce: %s will do nothing", ", ".join(idle))
        kind = Pipeline
        if not self.exact:
            links = open_links(trainer.ranks, self.mesh.lines("stage"))
            kind = partial(PipeDream, links=links, run_ahead=self.run_ahead, rehearsing=lambda: trainer.rehearsing)
        self.strategy = kind(
            model, find_blocks(trainer.recipe, model, None, KEY), self.layout, self.holders, self.mesh,
            split=Split(trainer.batch, self.replicas, accumulate), schedule=self.schedule,
            reduce=trainer.reduce if self.replicas > 1 else None, seed=trainer.options.seed,
            expected=self.trial and self.trial.loss, step=lambda: trainer.step, device=trainer.device,
        )  # fmt: skip
        return self.strategy

    def wrap_forward_backward(self, trainer, run: ForwardBackward) -> ForwardBackward:
        assert isinstance(run, Accumulate)
        self.strategy.loss = run.loss
        return self.strategy.forward_backward

    def on_fit_end(self, trainer) -> None:
        self.strategy.unwrap()  # parameter hooks would keep the trainer alive, which Python's collector can't see

    def on_fit_start(self, trainer) -> None:
        trainer.lag = int(not self.exact)

    def on_flush(self, trainer) -> None:
        self.strategy.drain()

    def rank_state_dict(self) -> dict[str, Any]:
        return self.strategy.pending()

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        if state["starts"] != list(self.layout.starts) or self.exact:
            log.warning("%s: the cut or the schedule differs, so the gradients of the last batch are dropped", KEY)
        else:
            self.strategy.load_pending(state)

    def merge_rank_states(self, states: Iterator[dict[str, Any]]) -> dict[str, Any]:
        log.warning("%s: the number of ranks differs, so the gradients of the last batch are dropped", KEY)
        return {}

    def decisions(self) -> dict[str, Any]:
        return {"starts": list(self.layout.starts), "blocks": self.layout.blocks, "schedule": self.schedule}

    def _resumed(self, trainer: Context, blocks: int) -> tuple[int, ...] | None:
        name = name_of(self, trainer.callbacks)
        saved = trainer.plan.manifest.get("decisions", {}).get(name, {})
        starts = saved.get("starts", []) if fits(saved, dict[str, Any]) else []
        if not fits(starts, list[int]) or len(starts) != self.virtual or saved.get("blocks") != blocks:
            return None
        return self._checked(starts[1:], blocks)

    def _try(self, trainer: Context, model: nn.Module, blocks: list[nn.Module]) -> Trial | None:
        """Run the first micro-batch through the whole model. None if no rank can, or if the data is an iterable."""
        plan, recipe, found = trainer.plan, trainer.recipe, None
        if plan.order is not None:  # otherwise reading a batch would consume it
            split = Split(trainer.batch, self.replicas, plan.accumulate)
            loader = Loader(
                plan.source, plan.order, split, replace(plan.data, workers=0), rank=self.mesh.place.get("data", 0),
                seed=trainer.options.seed, device=trainer.device, collate=getattr(recipe, "collate", default_collate),
            )  # fmt: skip
            with closing(loader):
                batch = next(loader.train(plan.manifest.get("samples", 0), stop=0)).peek()
            loss = trainer.precision.cast(NamedLosses(recipe, lambda: None))
            with trainer.precision.converted(model):
                found = try_whole(model, blocks, lambda: loss(model, batch), trainer.device)
        every = trainer.ranks.gather(found)
        self.trials = [] if None in every else [Trial(*trial) for trial in every]
        return found if self.trials else None

    def _cut(self, trainer: Context, model: nn.Module, blocks: list[nn.Module]) -> tuple[int, ...]:
        """Return the first block of each stage: balanced by measured times, or else by parameters."""
        layout = Layout(tuple(range(self.virtual)), len(blocks), self.stages, self.schedule == "zbv")
        ranks, replicas = [layout.rank(stage) for stage in range(self.virtual)], self.replicas
        place = [[rank * replicas + i for i in range(replicas)] for rank in ranks]
        if not self.trials:
            log.info("pipeline: no times were measured, so stages get even numbers of parameters")

        def cut(fits: Fits) -> tuple[int, ...] | None:
            if self.trials:
                return cut_by_time(self.trials, place, fits)
            head, *costs, tail = part_sums(model, blocks, nn.Parameter.numel)
            return balance(costs, [1.0] * self.virtual, head, tail, fits)

        own = self.memory_gib * 2**30 if self.memory_gib is not None else memory_limit(trainer.device)
        every = [math.inf if limit is None else limit for limit in trainer.ranks.gather(own)]
        limits = [min(every[rank] for rank in stage) for stage in place]
        in_flight = max_in_flight(self.schedule, self.virtual, self.stages, trainer.plan.accumulate, self.run_ahead)
        memory = stage_memory(trainer, model, blocks, self.trials, limits, in_flight, 1 if self.exact else 2)
        starts = cut(memory.fits)
        if starts and not memory.holds(starts, ranks):  # a rank's two stages may fit alone but not together
            memory = memory.halved()
            starts = cut(memory.fits)
        if not starts:
            raise refuse(memory)
        return starts

    def _refuse_unlike(self, model: nn.Module) -> None:
        """Refuse a model with a stage that trains nothing, or with a parameter that more than two ranks share."""
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        idle = set(range(self.virtual)) - {stage for name in trained for stage in self.holders[name]}
        if idle:
            raise ConfigError(
                f"{KEY}: stage {min(idle)} has no parameter that trains; unfreeze some, cut elsewhere by {KEY}.cut, or "
                "leave pipeline out"
            )
        for name in trained:
            if len({self.layout.rank(stage) for stage in self.holders[name]}) > 2:
                raise ConfigError(f"{KEY}: {name} is used by more than two ranks; untie it, or leave pipeline out")

    def _checked(self, cut: list[int], blocks: int) -> tuple[int, ...]:
        """Return the first block of each stage. Refuse a cut that leaves a stage without a block."""
        starts = (0, *cut)
        rises = all(one < other for one, other in zip(starts, (*cut, blocks), strict=True))
        if len(starts) != self.virtual or not rises:
            raise ConfigError(
                f"{KEY}.cut={cut}: must be {self.virtual - 1} rising numbers from 1 to {blocks - 1}, the first "
                f"block of each of {self.virtual} stages but the first; or use auto"
            )
        return starts
