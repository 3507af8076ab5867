"""Gives each rank a share of the batch in proportion to its speed, for unequal machines."""

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any

import torch
from torch import Tensor

from trainer.annotated import Below, Beta, PositiveFloat, PositiveInt, fits
from trainer.callback import Callback, Role, Symptom, name_of
from trainer.callbacks.hetero_batch.clock import ComputeClock
from trainer.callbacks.hetero_batch.shares import cut_again, cut_shares, fit, follow, keep, with_micros
from trainer.checks.recipe import weight_of
from trainer.context import Context
from trainer.cost.setup import Cost
from trainer.data.batch import Micro, Split, Step, count_samples
from trainer.data.decisions import Decisions, refuse_fixed_split
from trainer.data.parts import Parts
from trainer.data.resize import repeat_batch
from trainer.data.sampling.order import near_equal
from trainer.errors import ConfigError
from trainer.log import log
from trainer.parallel.forward_backward import ForwardBackward
from trainer.parallel.memory_search import bytes_of_step, drop_gradients, fits_alongside, search, state_share

KEY = "callbacks.hetero_batch"
PASSES = 3  # timed passes of the rehearsal


class HeteroBatch(Callback):
    """Splits each batch over the ranks by measured speed and memory. The mean over its items stays exact.

    New shares apply from a position that no rank has loaded yet. Each step has the same samples as with even shares. A
    resume repeats the decisions in checkpoints and `splits.jsonl`, including those that the interrupted run made after
    the checkpoint.
    """

    role = Role.BATCH
    remedies = {Symptom.SLOW_RANK: [{}]}
    communicates = True
    conflicts = {
        Role.SYNC: "each rank would step by its own gradient, which grows with its share; leave one out",
        "own_order": "a forward pass then waits for other ranks, so a rank's own speed is unknown; leave one out",
        "sync_batch_norm": "BatchNorm would wait in each forward pass for ranks that make more or fewer passes; "
        "set trainer.sync_batch_norm=false or leave hetero_batch out",
    }
    now: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(
        self,
        every: PositiveInt = 100,
        smoothing: Beta = 0.5,
        min_share: Annotated[PositiveFloat, Below(1)] = 0.1,
        max_micro: PositiveInt | list[PositiveInt] | None = None,
        shares: list[PositiveFloat] | None = None,
    ) -> None:
        if shares == []:
            raise ConfigError(f"{KEY}.shares=[]: is empty; give one for each rank, or null")
        self.every, self.smoothing, self.min_share = every, smoothing, min_share
        self.max_micro, self.shares = max_micro, shares
        self.speeds: list[float] = []  # samples per second of each rank
        self.held: list[int] = []  # the largest micro-batch that fits on each rank; empty until measured
        self.asked = 0  # the first position that this rank has not loaded or begun to load
        self.rehearsed = 0  # samples per pass of the rehearsal

    def cost(self) -> Cost:
        return Cost(left_out="ranks are taken as equal")

    def wrap_forward_backward(self, trainer, run: ForwardBackward) -> ForwardBackward:
        refuse_fixed_split(KEY, trainer.strategy.lockstep, trainer.plan.order)
        self._refuse(trainer)
        world, batch, plan = trainer.strategy.data_world, trainer.batch, trainer.plan
        caps = self.max_micro or plan.micro
        self.caps = caps if isinstance(caps, list) else [caps] * world
        self.least = max(1, int(self.min_share * batch / world))
        if self.shares:
            self.begin = with_micros(cut_shares(batch, self.shares), self.caps)
        else:
            even = [last - first for first, last in (near_equal(batch, rank, world) for rank in range(world))]
            self.begin = with_micros(even, self.caps)
            if not self.max_micro:
                self.begin["micros"] = [plan.accumulate] * world
        settings = {name: getattr(self, name) for name in ("every", "smoothing", "min_share", "shares")}
        device = torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else "cpu"
        made_with = {"world": world, "batch": batch, "caps": self.caps, "devices": trainer.ranks.gather(device)}
        self.made = Decisions(trainer.run_dir / "splits.jsonl", trainer.rank, made_with | settings)
        name = name_of(self, trainer.callbacks)
        self.made.begin(plan.manifest, name, trainer.ranks.first)
        for decision in self.made.made:
            self._refuse_invalid(decision.value, batch, world)
            self.speeds = decision.value["speeds"]
            self._hold(decision.value["held"])
        self.clock, self.weigh = ComputeClock(trainer.device, self.now), weight_of(trainer.recipe) or count_samples
        return lambda data, total: self._passes(trainer, run, data, total)

    def _refuse(self, trainer: Context) -> None:
        world, batch = trainer.strategy.data_world, trainer.batch
        if batch < world:
            raise ConfigError(
                f"{KEY}: batch={batch} is less than a sample for each of {world} ranks; give a larger one"
            )
        for key, given in (("shares", self.shares), ("max_micro", self.max_micro)):
            if isinstance(given, list) and len(given) != world:
                raise ConfigError(f"{KEY}.{key}={given}: has {len(given)} values; give one for each of {world} rank(s)")

    def _refuse_invalid(self, value: dict[str, Any], batch: int, world: int) -> None:
        """Refuse an invalid decision in a checkpoint, which is not trusted."""
        kinds = {"shares": list[int], "micros": list[int], "held": list[int], "speeds": list[float]}
        if all(fits(value.get(key), kind) and len(value[key]) == world for key, kind in kinds.items()):
            micros = zip(value["micros"], value["shares"], strict=True)
            cut = all(0 < count <= share for count, share in micros) and sum(value["shares"]) == batch
            if cut and min(value["speeds"]) > 0 and min(value["held"]) > 0 and fit(value, value["held"]):
                return
        raise ConfigError(f"trainer.resume: the checkpoint has no valid decisions of {KEY}; take another checkpoint")

    def _passes(self, trainer: Context, run: ForwardBackward, data: Step, total: Callable[[], int]) -> list[Tensor]:
        """Run the passes of a step, and time them.

        Micro-batches that were loaded before memory was measured may be too large. They are then cut into parts that
        fit.
        """
        if not self.held:
            self._hold(self._measure_memory(trainer, run, data.peek()))
        samples = len(data.refs) - len(data.bad) or self.rehearsed
        if not self.cuts or not (trainer.rehearsing or self.made.at(trainer.samples) is None):
            return self.clock.timed(run, data, total, samples)
        trainer.strategy.share_buffers()
        parts = Parts(data, self.held[trainer.strategy.data_rank], self.weigh, KEY)
        losses = parts.merge(self.clock.timed(run, parts, total, samples))
        trainer.strategy.reduce_gradients()
        return losses

    def _loaded(self, rank: int) -> int:
        """Return the size of a rank's first micro-batch, on which the rehearsal runs."""
        return near_equal(self.begin["shares"][rank], 0, self.begin["micros"][rank])[1]

    def _hold(self, held: list[int]) -> None:
        self.held, self.cuts = held, not fit(self.begin, held)

    def _measure_memory(self, trainer: Context, run: ForwardBackward, batch: Any) -> list[int]:
        """Return the largest micro-batch that fits on each rank, up to the knobs' limits. A collective.

        The passes of the search do not reduce, so each rank can run as many as it needs.
        """
        rank, world = trainer.strategy.data_rank, trainer.strategy.data_world
        if trainer.ddp["static_graph"]:
            log.info("hetero_batch: static_graph allows no pass without a reduction, so no memory is measured")
            return self.caps
        share, loaded = self.begin["shares"][rank], self._loaded(rank)
        most = min(self.caps[rank], share if self.shares else trainer.batch - self.least * (world - 1))

        step_bytes = bytes_of_step(trainer.strategy, state_share(trainer.new_optimizer, trainer.device))

        def holds(samples: int) -> bool:
            some = batch if samples == loaded else repeat_batch(batch, samples, KEY)
            step = Step([Micro(some, max(1, self.weigh(some)), [], [])])
            step.reduces = False
            fit = fits_alongside(step_bytes, lambda: run(step, lambda: step.weights[0] * world), trainer.device)
            drop_gradients(trainer.parameters, trainer.device)
            return fit

        trainer.strategy.share_buffers()
        held = trainer.ranks.gather(max(search(loaded, most, holds), default=0))
        if 0 in held:
            raise ConfigError(
                f"{KEY}: a single sample does not fit into the memory of rank {held.index(0)}; use a smaller model or "
                "shorter samples, or leave the rank out"
            )
        if not fit(self.begin, held):
            log.info("hetero_batch: by memory, the ranks' micro-batches have at most %s samples", held)
            if trainer.ddp["find_unused_parameters"]:
                raise ConfigError(
                    f"{KEY}: micro-batches of {self.caps} samples do not fit into memory, and find_unused_parameters "
                    f"lets the first steps have no other; set {KEY}.max_micro={held}"
                )
        return held

    def split(self, trainer, position: int) -> Split:
        self.asked = max(self.asked, position + trainer.batch)
        value = self.made.at(position) or self.begin
        return make_split(trainer.batch, tuple(value["shares"]), tuple(value["micros"]))

    def rehearse(self, trainer, run_pass: Callable[[Any], None], batch: Any) -> None:
        if not self.shares:
            self.clock.attach(trainer.undo)
        if self.made.made:  # a resume repeats decisions
            return
        self.rehearsed = self._loaded(trainer.strategy.data_rank)
        for _ in range(0 if self.shares else PASSES):
            run_pass(batch)
        self.rehearsed = 0
        self._decide(trainer, trainer.plan.manifest.get("samples", 0))

    def on_step_end(self, trainer) -> None:
        if not self.shares and trainer.step % self.every == 0 and not self.made.follows(trainer.samples):
            self._decide(trainer, trainer.samples)

    def _decide(self, trainer: Context, samples: int) -> None:
        """Measure all ranks' speeds and split the batch again. A collective."""
        own = self.clock.take()
        asked, counts, seconds = zip(*trainer.ranks.gather([self.asked, *own]), strict=True)
        made = self.made.made
        before, position = (made[-1].value, made[-1].position) if made else (self.begin, 0)
        measured = [count / second if second > 0 else 0.0 for count, second in zip(counts, seconds, strict=True)]
        if self.shares:
            self.speeds = self.shares
        elif min(measured) > 0:
            self.speeds = follow(self.speeds or measured, measured, self.smoothing)
        if not self.speeds:  # a rank's device has not finished a step yet
            return
        value = keep(before, self.held)
        if not self.shares:
            value = cut_again(value, trainer.batch, self.speeds, self.held, self.least)
        position = max(position, *asked)
        if value["shares"] != before["shares"]:
            text = "hetero_batch: step %d: the ranks' samples are %s instead of %s from sample %d on"
            log.info(text, trainer.step, value["shares"], before["shares"], position)
        self.made.add(samples, position, {**value, "speeds": self.speeds, "held": self.held})

    def on_fit_end(self, trainer) -> None:
        self.clock.detach()
        self.made.close()

    def decisions(self) -> dict[str, Any]:
        return self.made.state()


@lru_cache(maxsize=8)
def make_split(samples: int, shares: tuple[int, ...], micros: tuple[int, ...]) -> Split:
    return Split(samples, shares, micros)
