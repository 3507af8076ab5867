"""Gives each rank a share of the batch by its speed, for machines that differ."""

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from trainer.callback import Callback, Role, TrainerProtocol
from trainer.callbacks.hetero_batch.clock import ComputeClock
from trainer.callbacks.hetero_batch.shares import cut_shares, slowest
from trainer.config.schema import fits
from trainer.data.batch import Split
from trainer.data.decisions import Decisions
from trainer.data.sampling.order import near_equal
from trainer.errors import ConfigError, require
from trainer.forward_backward import ForwardBackward
from trainer.log import log

KEY = "callbacks.hetero_batch"
PASSES = 3  # of the rehearsal that are timed
GAIN = 0.02  # part of the step's time that other shares must save


class HeteroBatch(Callback):
    """Cuts each batch over the ranks by their measured speeds; the mean over its items stays exact.

    Every `every` steps the ranks gather their samples per second of computing, and cut the batch anew. The new shares
    hold from a position that no rank has loaded yet. A rank has as many micro-batches as its share needs, so their
    size, and the memory, stay. Each step has the samples that it has with even shares.

    Decisions are in the checkpoint, and in `splits.jsonl` in the folder of the run. A resume repeats them, also those
    that the interrupted run made after the checkpoint.

    Args:
        every: Steps between two measurements.
        smoothing: Weight of the past in the moving average of the speeds.
        min_share: Smallest share of a rank, relative to an even one.
        max_micro: Samples of a micro-batch at most, on every rank or on each; null: as without the callback.
        shares: Fixed shares, relative to each other, one for each rank; null: measured.
    """

    role = Role.BATCH
    communicates = True
    conflicts = {
        Role.SYNC: "each rank would step by its own gradient, which grows with its share; leave one out",
        "own_order": "a forward pass then waits for other ranks, so a rank's own speed can't be told; leave one out",
    }
    now: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(
        self,
        every: int = 100,
        smoothing: float = 0.5,
        min_share: float = 0.1,
        max_micro: int | list[int] | None = None,
        shares: list[float] | None = None,
    ) -> None:
        require(f"{KEY}.every", every, at_least=1)
        require(f"{KEY}.smoothing", smoothing, at_least=0, below=1)
        require(f"{KEY}.min_share", min_share, above=0, below=1)
        for size in max_micro if isinstance(max_micro, list) else [max_micro]:
            require(f"{KEY}.max_micro", size, at_least=1)
        if shares == []:
            raise ConfigError(f"{KEY}.shares=[]: is empty; give one for each rank, or null")
        for share in shares or []:
            require(f"{KEY}.shares", share, above=0, below=float("inf"))
        self.every, self.smoothing, self.min_share = every, smoothing, min_share
        self.max_micro, self.shares = max_micro, shares
        self.speeds: list[float] = []  # of each rank, in samples per second
        self.asked = 0  # the first position that this rank has not loaded or begun to load
        self.rehearsed = 0  # samples of a pass of the rehearsal

    def wrap_forward_backward(self, trainer, run: ForwardBackward) -> ForwardBackward:
        self._refuse(trainer)
        world, batch, plan = trainer.strategy.data_world, trainer.batch, trainer.plan
        caps = self.max_micro or plan.micro
        self.caps = caps if isinstance(caps, list) else [caps] * world
        self.least = max(1, int(self.min_share * batch / world))
        if self.shares:
            self.begin = self._value(cut_shares(batch, self.shares))
        else:
            even = [last - first for first, last in (near_equal(batch, rank, world) for rank in range(world))]
            self.begin = self._value(even) if self.max_micro else {"shares": even, "micros": [plan.accumulate] * world}
        settings = {name: getattr(self, name) for name in ("every", "smoothing", "min_share", "shares")}
        made_with = {"world": world, "batch": batch, "caps": self.caps, **settings}
        self.made = Decisions(trainer.run_dir / "splits.jsonl", trainer.rank, made_with)
        name = next(name for name, callback in trainer.callbacks.items() if callback is self)
        self.made.begin(plan.manifest, name, trainer.ranks.first)
        for decision in self.made.made:
            self.speeds = self._checked(decision.value, batch, world)
        self.clock = ComputeClock(trainer.device, self.now)
        if self.shares:
            return run
        return lambda data, total: self.clock.timed(run, data, total, len(data.refs) - len(data.bad) or self.rehearsed)

    def _refuse(self, trainer: TrainerProtocol) -> None:
        """Refuse strategies and data with which a rank can't have a share of its own.

        Raises:
            ConfigError: The message has the reason and the way out.
        """
        if trainer.strategy.lockstep:
            raise ConfigError(
                f"{KEY}: a forward pass communicates with this sharding, so every rank must make as many; "
                "leave hetero_batch or the sharding out"
            )
        if trainer.plan.order is None:
            raise ConfigError(
                f"{KEY}: recipe.data('train') is an iterable, which cuts the batches itself; return a dataset or "
                "shards, or leave hetero_batch out"
            )
        world, batch = trainer.strategy.data_world, trainer.batch
        if batch < world:
            raise ConfigError(
                f"{KEY}: batch={batch} is less than a sample for each of {world} ranks; give a larger one"
            )
        for key, given in (("shares", self.shares), ("max_micro", self.max_micro)):
            if isinstance(given, list) and len(given) != world:
                raise ConfigError(f"{KEY}.{key}={given}: has {len(given)} values; give one for each of {world} rank(s)")

    def _value(self, shares: list[int]) -> dict[str, Any]:
        """Return shares with the micro-batches that they need."""
        return {"shares": shares, "micros": [-(-share // cap) for share, cap in zip(shares, self.caps, strict=True)]}

    def _checked(self, value: dict[str, Any], batch: int, world: int) -> list[float]:
        """Return the speeds of a decision, which may be a stranger's.

        Raises:
            ConfigError: It is no decision of this callback.
        """
        kinds = {"shares": list[int], "micros": list[int], "speeds": list[float]}
        if all(fits(value.get(key), kind) and len(value[key]) == world for key, kind in kinds.items()):
            micros = zip(value["micros"], value["shares"], strict=True)
            cut = all(0 < count <= share for count, share in micros) and sum(value["shares"]) == batch
            if cut and min(value["speeds"]) > 0:
                return value["speeds"]
        raise ConfigError(f"trainer.resume: the checkpoint has no valid decisions of {KEY}; take another checkpoint")

    def split(self, trainer, position: int) -> Split:
        self.asked = max(self.asked, position + trainer.batch)
        value = self.made.at(position) or self.begin
        return make_split(trainer.batch, tuple(value["shares"]), tuple(value["micros"]))

    def rehearse(self, trainer, run_pass: Callable[[Any], None], batch: Any) -> None:
        if self.shares:
            return
        self.clock.attach(trainer.strategy, trainer.module)
        if self.made.made:  # a resume repeats decisions
            return
        first = self.begin["shares"][trainer.strategy.data_rank] // self.begin["micros"][trainer.strategy.data_rank]
        self.rehearsed = first
        for _ in range(PASSES):
            run_pass(batch)
        self.rehearsed = 0
        self._decide(trainer, trainer.plan.manifest.get("samples", 0))

    def on_step_end(self, trainer) -> None:
        if not self.shares and trainer.step % self.every == 0 and not self.made.follows(trainer.samples):
            self._decide(trainer, trainer.samples)

    def _decide(self, trainer: TrainerProtocol, samples: int) -> None:
        """Measure all ranks' speeds, and cut the batch anew. A collective."""
        own = self.clock.take()
        asked, counts, seconds = zip(*trainer.ranks.gather([self.asked, *own]), strict=True)
        made = self.made.made
        before, position = (made[-1].value, made[-1].position) if made else (self.begin, 0)
        new = [count / second if second > 0 else 0.0 for count, second in zip(counts, seconds, strict=True)]
        if min(new) > 0:
            past = self.smoothing if self.speeds else 0.0
            self.speeds = [past * old + (1 - past) * now for old, now in zip(self.speeds or new, new, strict=True)]
        if not self.speeds:  # some rank has not finished a step since its device began
            return
        value = self._value(cut_shares(trainer.batch, self.speeds, self.least))
        position = max(position, *asked)
        if slowest(value["shares"], self.speeds) > (1 - GAIN) * slowest(before["shares"], self.speeds):
            value = {"shares": before["shares"], "micros": before["micros"]}
        else:
            text = "hetero_batch: step %d: the ranks' samples are %s instead of %s from sample %d on"
            log.info(text, trainer.step, value["shares"], before["shares"], position)
        self.made.add(samples, position, {**value, "speeds": self.speeds})

    def on_fit_end(self, trainer) -> None:
        self.clock.detach()
        self.made.close()

    def decisions(self) -> dict[str, Any]:
        return {} if self.shares else self.made.state()


@lru_cache(maxsize=8)
def make_split(samples: int, shares: tuple[int, ...], micros: tuple[int, ...]) -> Split:
    return Split(samples, shares, micros)
