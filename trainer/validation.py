"""Computes validation metrics from sums and counts, so that each item has the same weight on every rank."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, nullcontext, suppress
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import DistError, ProcessGroup

from trainer import timeouts
from trainer.checks.recipe import METRICS, check_loss, check_metrics, refusal
from trainer.comm.ranks import Ranks, share_buffers
from trainer.data.bad_samples import allowed
from trainer.data.batch import Micro
from trainer.errors import ConfigError, DataError, nearest
from trainer.log import log
from trainer.metrics.media import check_media
from trainer.metrics.metric_objects import MetricObjects, kept, modules_in, parts_of
from trainer.metrics.named_losses import further, mean_of
from trainer.parallel.modes import evaluating
from trainer.parallel.strategy import OutputElsewhere
from trainer.precision import Precision

Metrics = dict[str, tuple[Tensor, int]]  # name -> sum and count
TRIED = 2  # micro-batches of each rank, before step 1
TRIES = ("metrics", "media", "validation_end")  # methods of a recipe that are tried on them
NO_BATCH = (
    "gave no batch, or only batches of weight 0; return data that every validation can iterate over again: shards, a "
    "dataset or a list, not a generator"
)


class Found(NamedTuple):
    """Metrics and bad samples of one pass over the validation data, over all ranks."""

    values: dict[str, float]
    names: list[str]  # names of all metrics, including those with a count of 0
    batches: int
    bad: int  # number of bad samples
    first_bad: str  # why the first of them is bad


class Evaluator:
    """The recipe's metrics, or else its loss, over all validation data.

    Args:
        split: The name of the split.
        batches: Prefix of a data set's metrics -> a function that yields this rank's part of the data set. The parts
            may be unequal or empty.
        samples: The number of samples in all parts; 0 if unknown.
        max_bad: The fraction of the samples that may be unreadable.
        replicas: The group over which the first rank's buffers are broadcast; None: each rank uses its own.
        lockstep: Every forward pass needs all ranks. A rank without a batch repeats its last one with weight 0.
        data_rank: This rank among those that read different samples. Samples that several ranks read count once.
        stopping: Returns whether this rank has received a stop signal.
        beat: Called after each batch.
    """

    def __init__(
        self,
        recipe: Any,
        split: str,
        batches: Mapping[str, Callable[[], Iterator[Micro]]],
        ranks: Ranks,
        precision: Precision,
        *,
        samples: int,
        max_bad: float,
        replicas: ProcessGroup | None,
        lockstep: bool,
        data_rank: int,
        stopping: Callable[[], object],
        beat: Callable[[], object],
    ) -> None:
        self.recipe, self.batches, self.ranks, self.precision = recipe, batches, ranks, precision
        self.split, self.key = split, f"recipe.data({split!r})"
        self.samples, self.max_bad, self.data_rank = samples, max_bad, data_rank
        self.replicas, self.lockstep = replicas, lockstep
        self.stopping, self.beat = stopping, beat
        self.objects = MetricObjects(ranks.rank, ranks.world, ranks.group_of)
        self.media: dict[str, Any] = {}  # from this rank's first batch of the last validation
        self.empty = set[str]()  # metrics with a count of 0 that a warning has already named
        self.asks = False  # the next batch is used for media
        self.walking = False  # in lockstep, the other ranks wait for this one at the next batch
        self.apart = False  # ranks may be in different collectives, as one failed or timed out in lockstep

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float] | None:
        """Return the metrics, or None on all ranks if a stop signal interrupts the validation. A collective.

        Raises:
            ConfigError, DataError: All counts are 0, or too many samples are bad. Raised on all ranks.
            DistError: Another rank has failed.
        """
        share_buffers(model, self.replicas)
        found = self._walk(model)
        if found is None:
            return None
        if found.bad:
            self._report_bad(found.bad, found.first_bad)
        if not found.values and found.names and hasattr(self.recipe, "metrics"):
            own_names = ", ".join(name.removeprefix(f"{self.split}/") for name in found.names)
            raise ConfigError(
                f"recipe.metrics(): the count of {own_names} is 0 in every batch of {self.key}; "
                "return (sum, count) with the number of items in the sum"
            )
        if not found.values:
            raise DataError(f"{self.key}: {NO_BATCH}")
        if empty := sorted({*found.names} - found.values.keys() - self.empty):
            self.empty.update(empty)
            log.warning("validation: %s: the count is 0 in every batch, so there is no value", ", ".join(empty))
        return found.values

    @torch.no_grad()
    def try_out(self, watched: Mapping[str, str], model: nn.Module) -> None:
        """Try the recipe's `metrics`, `media` and `validation_end` on two micro-batches. A collective.

        Without these methods, only the data is read.

        Raises:
            ConfigError: The recipe returns no metrics, or lacks one of `watched` (config key -> metric).
            DataError: No rank has a batch.
            DistError: Another rank has failed.
        """
        device = self.precision.device
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []), kept(self._own_objects()):
                found = self._walk(model, TRIED)
        except Exception as error:
            error.place = "in the trial of validation, before step 1"  # pyright: ignore[reportAttributeAccessIssue]
            raise
        if found is None or not found.batches:
            raise DataError((found and found.first_bad) or f"{self.key}: {NO_BATCH}")
        known = {*found.names, *found.values}
        if not hasattr(self.recipe, "metrics"):
            known |= {f"{prefix}/loss" for prefix in self.batches}
        if not known:
            raise refusal("metrics", {}, METRICS, " for each batch")
        for key, name in watched.items():
            if name not in known:
                raise ConfigError(f"{key}={name}: validation gives no such metric; {nearest(name, known)}")

    def _walk(self, model: nn.Module, most: int | None = None) -> "Found | None":
        """Run the batches and then `validation_end` of each data set; return None at a signal. A collective.

        The recipe's `validation_end` may communicate, so it is called only if no rank has failed before.

        Args:
            most: The number of batches per data set; None: all.
        """
        names: dict[str, None] = {}
        values: dict[str, float] = {}
        batches, bad, first_bad = 0, dict[tuple[str, int], int](), ""
        self.asks, self.media = hasattr(self.recipe, "media"), {}
        with evaluating(model):
            for prefix, micros in self.batches.items():
                self.objects.begin(prefix)
                take = self._take_together if self.lockstep else self._take
                parts = self._on_ranks(partial(take, model, micros, most))
                if None in parts:
                    return None
                ranks, done, data_ranks, counts, firsts = zip(*parts, strict=True)
                bad |= {(prefix, rank): count for rank, count in zip(data_ranks, counts, strict=True)}
                batches, first_bad = batches + sum(done), first_bad or next(filter(None, firsts), "")
                if not any(done):
                    continue
                ends, updated = zip(*self._on_ranks(partial(self._end, model)), strict=True)
                names |= {f"{prefix}/{name}": None for name in chain(*ranks, *ends)}
                means = mean_of(ranks) | mean_of(ends)
                values |= {f"{prefix}/{name}": value for name, value in means.items()}
                if any(updated):  # the first rank that has a value broadcasts it
                    computed = self._on_ranks(partial(self.objects.compute, updated))
                    values |= {name: value for own in reversed(computed) for name, value in own.items()}
        return Found(values, list(names), batches, sum(bad.values()), first_bad)

    def _on_ranks(self, work: Callable[[], Any]) -> list[Any]:
        """Do this rank's work; return the JSON value that each rank's work returned. A collective.

        Raises:
            DistError: Another rank failed.
        """
        own = failure = None
        try:
            own = work()
        except Exception as error:
            if self.apart:
                raise
            failure = error  # the other ranks wait for this one's report
        try:
            reports = self.ranks.gather([own, failure is not None])
        except Exception:
            self.apart = True
            raise
        finally:
            if failure:
                raise failure
        for rank, (_, failed) in enumerate(reports):
            if failed:
                raise DistError(f"rank {rank} failed in validation")
        return [value for value, _ in reports]

    def _take_together(
        self, model: nn.Module, batches: Callable[[], Iterator[Micro]], most: int | None
    ) -> list[Any] | None:
        """Run `_take` in lockstep. A failure is reported to the others at their next batch, where all ranks end.

        Ranks that wait for a pass of this one never reach their next batch. They get an error when this process ends.
        """
        self.walking = True
        try:
            return self._take(model, batches, most)
        except Exception:
            try:
                if self.walking:
                    self.ranks.agree((0, 0, 0, 0, 1), timeouts.PASS_S)()
            except Exception:
                self.apart = True
            raise

    def _take(self, model: nn.Module, batches: Callable[[], Iterator[Micro]], most: int | None) -> list[Any] | None:
        """Run this rank's batches of a data set; return None at a stop signal.

        Returns:
            The sum and count of each metric, the number of batches, and `data_rank`. Then the number of this rank's bad
            samples, and why the first of them is bad.
        """
        totals: dict[str, list[Any]] = {}
        bad: list[str] = []
        done, logged_at = 0, time.monotonic()
        measure = self._pass
        if most and not any(hasattr(self.recipe, name) for name in TRIES):
            measure = lambda *_: {}  # noqa: E731 no forward pass, for the names are known
        with closing(self._passes(batches(), bad, most)) as passes:
            for micro, counts in islice(passes, None if self.lockstep else most):  # in lockstep all agree on the end
                if micro is None:
                    return None
                done += 1
                for name, (total, count) in measure(model, micro, counts).items():
                    both = totals.setdefault(name, [0.0, 0])
                    if count:  # otherwise the sum may be 0 / 0
                        both[0] += total.double()
                        both[1] += count
                self.beat()
                if time.monotonic() - logged_at > timeouts.LOG_EVERY_S:
                    logged_at = time.monotonic()
                    log.info("validation: %d batches so far", done)
        sums = {name: [float(total), count] for name, (total, count) in totals.items()}
        return [sums, done, self.data_rank, len(bad), bad[0] if bad else ""]

    def _pass(self, model: nn.Module, micro: Micro, counts: bool) -> Metrics:
        """Return the metrics of a batch. A repeated batch, which does not count, returns none and leaves no state."""
        with nullcontext() if counts else kept(self._stateful(model)):
            try:
                metrics = self.precision.cast(self._measure)(model, micro.batch, micro.weight)
            except OutputElsewhere:
                metrics = {}
        if self.asks:
            self.media, self.asks = self._ask_media(model, micro.batch), False
        return metrics if counts else {}

    def _own_objects(self) -> list[Any]:
        """Return the recipe's metric objects. Some keep values, such as extremes, across a `reset`."""
        return [part for part in modules_in(getattr(self.recipe, "__dict__", {})) if hasattr(part, "compute")]

    def _stateful(self, model: nn.Module) -> list[Any]:
        """Return the objects in which `metrics` may accumulate numbers."""
        known = [part for metric in self.objects.objects.values() for part in parts_of(metric)]
        if not hasattr(self.recipe, "validation_end"):
            return known
        own = getattr(self.recipe, "__dict__", {})
        return [*known, self.recipe, *modules_in(own), *model.modules()]

    def _end(self, model: nn.Module) -> list[Any]:
        """Return the sums and counts of `validation_end`, and which metric objects were updated."""
        found: Any = {}
        if hasattr(self.recipe, "validation_end"):
            with suppress(OutputElsewhere):
                found = check_metrics(self.objects.take(self.recipe.validation_end(model)), "validation_end")
        return [{name: [float(total), count] for name, (total, count) in found.items()}, self.objects.updated()]

    def _ask_media(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Return the recipe's media. The random numbers it draws do not affect later batches."""
        try:
            with torch.random.fork_rng([self.precision.device] if self.precision.device.type == "cuda" else []):
                media = check_media(self.precision.cast(self.recipe.media)(model, batch), "recipe.media()")
        except OutputElsewhere:
            if self.ranks.rank == 0:
                log.warning("recipe.media(): rank 0 runs a stage without output, so this validation has no media")
            return {}
        if self.ranks.rank:
            return {}
        return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in media.items()}

    def _passes(self, own: Iterator[Micro], bad: list[str], most: int | None) -> Generator[tuple[Micro | None, bool]]:
        """Yield the micro-batches and whether each counts, skipping those whose samples are all bad."""
        for micro, counts in self._together(own, most) if self.lockstep else self._alone(own):
            if micro is not None:
                bad += [each.why for each in micro.bad if counts]
            if micro is None or micro.batch is not None:
                yield micro, counts

    def _alone(self, own: Iterator[Micro]) -> Iterator[tuple[Micro | None, bool]]:
        """Yield this rank's batches, which all count, and None at a signal."""
        for micro in own:
            yield micro, True
            if self.stopping():
                yield None, False

    def _together(self, own: Iterator[Micro], most: int | None) -> Iterator[tuple[Micro | None, bool]]:
        """Yield equally many batches on every rank. A rank that runs out repeats its last, which does not count."""
        last, done = None, 0
        while True:
            micro = None if done == most else next(own, None)
            usable = micro is not None and micro.batch is not None  # unusable if all of its samples are bad
            last = micro if usable else last
            word = (micro is not None, usable, last is None, bool(self.stopping()), False)
            more, passes, without, stopping, failed = self.ranks.agree(tuple(map(int, word)))()
            if stopping:
                yield None, False
            if stopping or failed or not more:
                self.walking = False
                return
            done += bool(passes)
            if passes and without:
                raise DataError(f"{self.key}: some ranks have no batch; give each rank at least one")
            if micro is not None:
                yield micro, True
            if passes and not usable:
                yield last, False

    def _report_bad(self, count: int, first: str) -> None:
        most = allowed(self.max_bad, self.samples)
        if count > most:
            raise DataError(
                f"data.max_bad: {count} of {self.samples} samples of {self.key} could not be read, and the "
                f"limit is {most}; the first: {first}"
            )
        if self.ranks.rank == 0:
            log.warning("validation: %d of %d samples were left out; the first: %s", count, self.samples, first)

    def _measure(self, model: nn.Module, batch: Any, weight: int) -> Metrics:
        if hasattr(self.recipe, "metrics"):
            return check_metrics(self.objects.take(self.recipe.metrics(model, batch)))
        found = self.recipe.loss(model, batch)
        named = found if isinstance(found, Mapping) else {"loss": found}
        further(named)
        check_loss(named["loss"])
        return {name: (torch.as_tensor(value) * weight, weight) for name, value in named.items()}
