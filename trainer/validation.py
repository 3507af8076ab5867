"""Metrics over the validation data: sums and counts, so that unequal batches and ranks weigh what they should."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DistError

from trainer.comm.ranks import Ranks
from trainer.data.bad_samples import allowed
from trainer.data.batch import Micro
from trainer.errors import ConfigError, DataError, nearest
from trainer.log import log
from trainer.precision import Precision

Metrics = dict[str, tuple[Tensor, int]]  # name -> sum and count


class Evaluator:
    """The recipe's metrics, or its loss, over all of the validation data.

    Args:
        batches: Walks this rank's part of the data once. Parts of ranks may be unequal, or empty.
        samples: The number of samples in all parts; 0 if it is unknown.
        max_bad: The share of them that may be unreadable.
        lockstep: Every forward pass needs all ranks, so a rank that has no batch left repeats its last with weight 0.
        stopping: Tells whether this rank has heard a signal to stop.
        beat: Called after each batch.
    """

    def __init__(
        self,
        recipe: Any,
        batches: Callable[[], Iterator[Micro]],
        ranks: Ranks,
        precision: Precision,
        *,
        samples: int,
        max_bad: float,
        lockstep: bool,
        stopping: Callable[[], object],
        beat: Callable[[], object],
    ) -> None:
        self.recipe, self.batches, self.ranks, self.precision = recipe, batches, ranks, precision
        self.samples, self.max_bad, self.lockstep = samples, max_bad, lockstep
        self.stopping, self.beat = stopping, beat

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float] | None:
        """Return the metrics; None, on all ranks, if a signal to stop has ended the validation. A collective.

        Raises:
            DataError: on all ranks, if nothing was counted on any, or more samples are bad than may be.
            DistError: another rank has failed.
        """
        own: dict[str, Any] | None = {}
        bad: list[str] = []
        failure = None
        self.ranks.share_buffers(model)
        try:
            own = self._sums(model, bad)
        except Exception as error:
            failure = error  # the other ranks wait for what this one has to say
        try:
            reports = self.ranks.gather([own, len(bad), bad[:1], failure is not None])
        finally:
            if failure:
                raise failure
        ranks, counts, firsts, failed = zip(*reports, strict=True)
        if any(failed):
            raise DistError(f"rank {failed.index(True)} failed in validation")
        if None in ranks:
            return None
        if sum(counts):
            self._report_bad(sum(counts), next(first[0] for first in firsts if first))
        if not any(ranks):
            raise DataError(
                "recipe.data('val'): gave no batch, or only such of weight 0; "
                "return what can be walked again for each validation: shards, a dataset or a list, not a generator"
            )
        names = {name: None for rank in ranks for name in rank}  # in order; a rank may have had no batch
        both = {name: [sum(rank[name][i] for rank in ranks if name in rank) for i in (0, 1)] for name in names}
        return {f"val/{name}": total / count for name, (total, count) in both.items()}

    @torch.no_grad()
    def refuse_unknown(self, watched: Mapping[str, str], model: nn.Module) -> None:
        """Refuse to watch a metric that validation does not give. One micro-batch tells what a recipe gives.

        Raises:
            ConfigError: for one of `watched`, config key -> metric, with the nearest that there are. A collective.
        """
        known = {"val/loss"}
        if hasattr(self.recipe, "metrics"):
            with closing(self._each_batch(model, [])) as batches:
                own = [f"val/{name}" for name in next(batches, None) or ()]
            known = {name for names in self.ranks.gather(own) for name in names}
        for key, name in watched.items():
            if name not in known:
                raise ConfigError(f"{key}={name}: this run's validation gives no such metric; {nearest(name, known)}")

    def _sums(self, model: nn.Module, bad: list[str]) -> dict[str, Any] | None:
        """Sum each metric over this rank's part, and what it counts; None if a signal to stop was heard."""
        totals: dict[str, list[Any]] = {}
        with closing(self._each_batch(model, bad)) as batches:
            for metrics in batches:
                if metrics is None:
                    return None
                self.beat()
                for name, (total, count) in metrics.items():
                    if count:  # else the sum may be 0 / 0
                        both = totals.setdefault(name, [0.0, 0])
                        both[0] += total.double()
                        both[1] += count
        return {name: [float(total), count] for name, (total, count) in totals.items()}

    def _each_batch(self, model: nn.Module, bad: list[str]) -> Generator[Metrics | None]:
        """Yield the metrics of each batch, and None at a signal; add to `bad` why samples are in no batch."""
        training = [module for module in model.modules() if module.training]  # a recipe may freeze some
        model.eval()
        measure = self.precision.cast(self._measure)
        try:
            for micro, counts in self._together() if self.lockstep else self._alone():
                if micro is None:
                    yield None
                    return
                bad += [each.why for each in micro.bad if counts]
                if micro.batch is not None:
                    metrics = measure(model, micro.batch, micro.weight)
                    yield metrics if counts else {}
        finally:
            for module in training:
                module.training = True

    def _alone(self) -> Iterator[tuple[Micro | None, bool]]:
        """Give this rank's batches, each of which counts; None at a signal."""
        for micro in self.batches():
            yield micro, True
            if self.stopping():
                yield None, False

    def _together(self) -> Iterator[tuple[Micro | None, bool]]:
        """Give every rank as many batches: one that has no more gets its last again, which does not count."""
        own, last = self.batches(), None
        while True:
            micro = next(own, None)
            more, stopping = self.ranks.agree((int(micro is not None), int(bool(self.stopping()))))()
            if stopping:
                yield None, False
            if stopping or not more:
                return
            last = micro or last
            if last is None:
                raise DataError("recipe.data('val'): has no batch for some rank; give at least one for each")
            yield last, micro is not None

    def _report_bad(self, count: int, first: str) -> None:
        most = allowed(self.max_bad, self.samples)
        if count > most:
            raise DataError(
                f"data.max_bad: {count} of {self.samples} samples of recipe.data('val') could not be read, and {most} "
                f"may be; the first: {first}"
            )
        if self.ranks.rank == 0:
            log.warning("validation: %d of %d samples were left out; the first: %s", count, self.samples, first)

    def _measure(self, model: nn.Module, batch: Any, weight: int) -> Metrics:
        if hasattr(self.recipe, "metrics"):
            return self.recipe.metrics(model, batch)
        return {"loss": (self.recipe.loss(model, batch) * weight, weight)}
