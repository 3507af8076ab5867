"""Computes metrics over the validation data, from sums and counts: each item has the same weight on every rank."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DistError, ProcessGroup

from trainer import timeouts
from trainer.comm.ranks import Ranks, share_buffers
from trainer.data.bad_samples import allowed
from trainer.data.batch import Micro
from trainer.errors import ConfigError, DataError, nearest
from trainer.log import log
from trainer.monitors.media import check_media
from trainer.monitors.metric_objects import MetricObjects
from trainer.parallel.strategy import OutputElsewhere
from trainer.precision import Precision
from trainer.recipe_checks import METRICS, check_loss, check_metrics, refusal

Metrics = dict[str, tuple[Tensor, int]]  # name -> sum and count
TRIED = 2  # micro-batches of each rank, before step 1
NO_BATCH = (
    "recipe.data('val'): gave no batch, or only batches of weight 0; return data that every validation can iterate "
    "over again: shards, a dataset or a list, not a generator"
)


class Evaluator:
    """The recipe's metrics, or else its loss, over all validation data.

    Args:
        batches: For each data set, the prefix of its metrics, and a function that yields this rank's part of the data
            once. The ranks' parts may be unequal, or empty.
        samples: The number of samples in all parts; 0 if unknown.
        max_bad: The share of the samples that may be unreadable.
        replicas: The ranks whose buffers become those of the first; None: this rank's stay.
        lockstep: Every forward pass needs all ranks. A rank without a batch repeats its last one, with weight 0.
        data_rank: Of this rank. Samples that several ranks read count once.
        stopping: Returns whether this rank has received a signal to stop.
        beat: Called after each batch.
    """

    def __init__(
        self,
        recipe: Any,
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
        self.samples, self.max_bad, self.data_rank = samples, max_bad, data_rank
        self.replicas, self.lockstep = replicas, lockstep
        self.stopping, self.beat = stopping, beat
        alone = "there are several data sets" if len(batches) > 1 else ""
        self.objects = MetricObjects("ranks repeat batches, to keep in step" if lockstep else alone)
        self.media: dict[str, Any] = {}  # of this rank's first batch of the last validation

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float] | None:
        """Return the metrics, or None on all ranks if a signal to stop has ended the validation. A collective.

        Raises:
            ConfigError, DataError: No rank counted an item, or too many samples are bad. Raised on all ranks.
            DistError: Another rank has failed.
        """
        own: dict[str, Any] | None = {}
        bad: list[str] = []
        failure = None
        share_buffers(model, self.replicas)
        self.objects.reset()
        try:
            own = self._sums(model, bad)
        except Exception as error:
            failure = error  # the other ranks wait for this one's report
        try:
            reports = self.ranks.gather([own, [self.data_rank, len(bad)], bad[:1], failure is not None])
        finally:
            if failure:
                raise failure
        ranks, counts, firsts, failed = zip(*reports, strict=True)
        if any(failed):
            raise DistError(f"rank {failed.index(True)} failed in validation")
        if None in ranks:
            return None
        if count := sum(dict(counts).values()):
            self._report_bad(count, next(first[0] for first in firsts if first))
        names = {name: None for rank in ranks for name in rank}  # in order; a rank without a batch has none
        both = {name: [sum(rank[name][i] for rank in ranks if name in rank) for i in (0, 1)] for name in names}
        values = {name: total / count for name, (total, count) in both.items() if count}
        values |= self.objects.compute(self.ranks.gather)
        if not values and both and hasattr(self.recipe, "metrics"):
            own_names = ", ".join(name.removeprefix("val/") for name in both)
            raise ConfigError(
                f"recipe.metrics(): the count of {own_names} is 0 in every batch of recipe.data('val'); "
                "return (sum, count) with the number of items in the sum"
            )
        if not values:
            raise DataError(NO_BATCH)
        return values

    @torch.no_grad()
    def try_out(self, watched: Mapping[str, str], model: nn.Module) -> None:
        """Try the recipe's `metrics` and `media`, or its data, on two micro-batches. A collective.

        Raises:
            ConfigError: The recipe gives no metrics, or lacks one of `watched` (config key -> metric).
            DataError: There is no batch on any rank.
        """
        device, bad = self.precision.device, list[str]()
        cuda = [device] if device.type == "cuda" else []
        try:
            with torch.random.fork_rng(cuda), closing(self._names(model, bad)) as batches:
                own = list(batches)
        except Exception as error:
            error.place = "in the trial of validation, before step 1"  # pyright: ignore[reportAttributeAccessIssue]
            raise
        listed = [*chain(*own), *self.objects.objects]
        self.objects.reset()
        names, counts, firsts = zip(*self.ranks.gather([listed, len(own), bad[:1]]), strict=True)
        if not any(counts):
            raise DataError(next((first[0] for first in firsts if first), NO_BATCH))
        known = set(chain(*names))
        if not hasattr(self.recipe, "metrics"):
            known |= {f"{prefix}/loss" for prefix in self.batches}
        if not known:
            raise refusal("metrics", {}, METRICS, " for each batch")
        for key, name in watched.items():
            if name not in known:
                raise ConfigError(f"{key}={name}: validation gives no such metric; {nearest(name, known)}")

    def _names(self, model: nn.Module, bad: list[str]) -> Generator[list[str]]:
        """Yield the metrics' names of each tried batch. A recipe without metrics gets no forward pass, and no names."""
        if hasattr(self.recipe, "metrics") or hasattr(self.recipe, "media"):
            with closing(self._each_batch(model, bad, TRIED)) as batches:
                yield from (list(metrics or ()) for metrics in batches)
            return
        for batches in self.batches.values():
            yield from islice(self._read(batches(), bad), TRIED)

    def _read(self, micros: Iterator[Micro], bad: list[str]) -> Generator[list[str]]:
        """Yield no names for each batch that can be used."""
        for micro in micros:
            bad += [each.why for each in micro.bad]
            if micro.batch is not None:
                yield []

    def _sums(self, model: nn.Module, bad: list[str]) -> dict[str, Any] | None:
        """Sum each metric and its count over this rank's part; return None at a signal to stop."""
        totals: dict[str, list[Any]] = {}
        logged_at = time.monotonic()
        with closing(self._each_batch(model, bad)) as batches:
            for done, metrics in enumerate(batches, start=1):
                if metrics is None:
                    return None
                self.beat()
                if time.monotonic() - logged_at > timeouts.LOG_EVERY_S:
                    logged_at = time.monotonic()
                    log.info("validation: %d batches so far", done)
                for name, (total, count) in metrics.items():
                    both = totals.setdefault(name, [0.0, 0])
                    if count:  # else the sum may be 0 / 0
                        both[0] += total.double()
                        both[1] += count
        return {name: [float(total), count] for name, (total, count) in totals.items()}

    def _each_batch(self, model: nn.Module, bad: list[str], most: int | None = None) -> Generator[Metrics | None]:
        """Yield the metrics of each batch, and None at a signal. Add the reasons of bad samples to `bad`.

        Args:
            most: Batches of each data set; None: all.
        """
        training = [module for module in model.modules() if module.training]  # a recipe may freeze some modules
        model.eval()
        measure = self.precision.cast(self._measure)
        asks, self.media = hasattr(self.recipe, "media"), {}
        try:
            for prefix, batches in self.batches.items():
                for micro, counts in islice(self._passes(batches(), bad), most):
                    if micro is None:
                        yield None
                        return
                    try:
                        metrics = measure(model, micro.batch, micro.weight, prefix)
                    except OutputElsewhere:
                        metrics = {}
                    if asks:
                        self.media, asks = self._ask_media(model, micro.batch), False
                    yield {f"{prefix}/{name}": value for name, value in metrics.items()} if counts else {}
        finally:
            for module in training:
                module.training = True

    def _ask_media(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Return the recipe's media. Random numbers that it draws change no later batch."""
        try:
            with torch.random.fork_rng([self.precision.device] if self.precision.device.type == "cuda" else []):
                media = check_media(self.precision.cast(self.recipe.media)(model, batch), "recipe.media()")
        except OutputElsewhere:
            if self.ranks.rank == 0:
                log.warning("recipe.media(): rank 0 has a stage without output, so this validation has no media")
            return {}
        if self.ranks.rank:
            return {}
        return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in media.items()}

    def _passes(self, own: Iterator[Micro], bad: list[str]) -> Iterator[tuple[Micro | None, bool]]:
        """Yield what `_alone` or `_together` yields, without batches whose samples are all bad."""
        for micro, counts in self._together(own) if self.lockstep else self._alone(own):
            if micro is not None:
                bad += [each.why for each in micro.bad if counts]
            if micro is None or micro.batch is not None:
                yield micro, counts

    def _alone(self, own: Iterator[Micro]) -> Iterator[tuple[Micro | None, bool]]:
        """Yield this rank's batches, all of which count, and None at a signal."""
        for micro in own:
            yield micro, True
            if self.stopping():
                yield None, False

    def _together(self, own: Iterator[Micro]) -> Iterator[tuple[Micro | None, bool]]:
        """Yield as many batches on every rank: a rank without further ones repeats its last, which does not count."""
        last = None
        while True:
            micro = next(own, None)
            usable = micro is not None and micro.batch is not None  # else all of its samples are bad
            last = micro if usable else last
            word = (micro is not None, usable, last is None, bool(self.stopping()))
            more, passes, without, stopping = self.ranks.agree(tuple(map(int, word)))()
            if stopping:
                yield None, False
            if stopping or not more:
                return
            if passes and without:
                raise DataError("recipe.data('val'): has no batch for some ranks; give each rank at least one batch")
            if micro is not None:
                yield micro, True
            if passes and not usable:
                yield last, False

    def _report_bad(self, count: int, first: str) -> None:
        most = allowed(self.max_bad, self.samples)
        if count > most:
            raise DataError(
                f"data.max_bad: {count} of {self.samples} samples of recipe.data('val') could not be read, and the "
                f"limit is {most}; the first: {first}"
            )
        if self.ranks.rank == 0:
            log.warning("validation: %d of %d samples were left out; the first: %s", count, self.samples, first)

    def _measure(self, model: nn.Module, batch: Any, weight: int, prefix: str) -> Metrics:
        if hasattr(self.recipe, "metrics"):
            return check_metrics(self.objects.take(prefix, self.recipe.metrics(model, batch)))
        loss = self.recipe.loss(model, batch)
        named = loss if isinstance(loss, Mapping) else {"loss": loss}
        check_loss(named.get("loss", loss))
        return {name: (torch.as_tensor(value) * weight, weight) for name, value in named.items()}
