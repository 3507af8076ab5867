"""Computes metrics and predictions of a model over a recipe's data, on the connected ranks."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import DistError, ProcessGroup
from torch.utils.data import default_collate

from trainer.checks.recipe import weight_of
from trainer.comm.ranks import Ranks
from trainer.config.options import DataOptions
from trainer.data.bad_samples import Bad, allowed
from trainer.data.batch import Micro, Split
from trainer.data.iterable import Iterated, is_used_up
from trainer.data.loader import Loader
from trainer.data.opening import open_source
from trainer.data.source import NamedSources, Samples, Source, by_prefix
from trainer.data.torch_loader import refuse_other_replicas
from trainer.errors import ConfigError, DataError
from trainer.inference.predictions import Predictions, rows_of
from trainer.log import log
from trainer.parallel.modes import evaluating
from trainer.precision import Precision
from trainer.validation import Evaluator


@dataclass
class Inference:
    """Runs a model over a recipe's data, split over the ranks: each sample is read by one rank."""

    recipe: Any
    ranks: Ranks
    precision: Precision
    data: DataOptions
    _: KW_ONLY
    micro: int  # samples per forward pass on one rank
    seed: int
    asked: bool = False  # `micro` overrides a data set's `validation_batch`
    replicas: ProcessGroup | None = None  # its first rank broadcasts its buffers; None: each rank uses its own
    lockstep: bool = False  # every forward pass needs all ranks
    data_rank: int = 0  # this rank among those that read different samples
    data_world: int = 1  # the number of these ranks
    beat: Callable[[], object] = lambda: None  # called after each batch

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """Return the metrics over all samples of `recipe.data(split)`, named `SPLIT/METRIC`. A collective."""
        source, loader = self._open(split, weight_of(self.recipe))
        with closing(loader):
            evaluator = Evaluator(
                self.recipe, split,
                {prefix: partial(loader.validate, part) for prefix, part in by_prefix(source, split).items()},
                self.ranks, self.precision, samples=source.size, max_bad=self.data.max_bad,
                replicas=self.replicas, lockstep=self.lockstep, data_rank=self.data_rank,
                stopping=lambda: False, beat=self.beat,
            )  # fmt: skip
            metrics = evaluator.evaluate(model)
        assert metrics is not None  # nothing stops it
        return metrics

    def predict(self, model: nn.Module, split: str) -> Predictions:
        """Return the outputs of `recipe.predict` for all samples of `recipe.data(split)`, in order. A collective."""
        if not callable(getattr(self.recipe, "predict", None)):
            kind = type(self.recipe).__name__
            raise ConfigError(f"recipe: {kind} has no method 'predict'; define predict(model, batch)")
        source, loader = self._open(split, lambda batch: 1)  # data without targets can't be weighed
        own, bad, failure = Predictions(), list[Bad](), None
        with closing(loader):
            try:
                own, bad = self._own(model, source, loader)
            except Exception as error:
                failure = error  # the other ranks wait for this one's report
            found = self.ranks.each([failure is not None, self.data_rank, len(bad), bad[0].why if bad else ""])
        if failure:
            raise failure
        if failed := [rank for rank, (has_failed, *_) in enumerate(found) if has_failed]:
            raise DistError(f"rank {failed[0]} failed in predict")
        self._report_bad({data_rank: (count, why) for _, data_rank, count, why in found if count}, source.size)
        return own.gathered(self.ranks)

    def _report_bad(self, bad: dict[int, tuple[int, str]], samples: int) -> None:
        """Log how many samples are bad, and why the first one is. Raises DataError if there are too many."""
        count, first = sum(count for count, _ in bad.values()), next((why for _, why in bad.values()), "")
        if count > allowed(self.data.max_bad, samples):
            raise DataError(f"data.max_bad: {count} samples could not be read; the first: {first}")
        if count and self.ranks.rank == 0:
            log.warning("predict: %d samples could not be read, and are left out; the first: %s", count, first)

    def _own(self, model: nn.Module, source: Source | NamedSources, loader: Loader) -> tuple[Predictions, list[Bad]]:
        if not isinstance(source, Samples):
            kind = "several data sets" if isinstance(source, NamedSources) else "batches"
            raise ConfigError(f"predict: recipe.data gives {kind}, which have no order; return one Dataset or shards")
        own, bad = Predictions(), list[Bad]()
        predict = self.precision.cast(self.recipe.predict)
        with torch.no_grad(), evaluating(model):
            for micro in loader.validate():
                bad += micro.bad
                if micro.batch is not None:
                    self._add(own, source, micro, predict(model, micro.batch))
                self.beat()
        return own, bad

    def _add(self, own: Predictions, source: Samples, micro: Micro, output: Any) -> None:
        left_out = {each.ref for each in micro.bad}
        refs = [ref for ref in micro.refs if ref not in left_out]
        numbers = [source.bases[ref.shard] + ref.offset for ref in refs]
        own.add(numbers, [str(source.reader.name(ref)[1]) for ref in refs], rows_of(output, len(refs)))

    def _open(self, split: str, weight: Callable[[Any], int] | None) -> tuple[Source | NamedSources, Loader]:
        """Open the data on rank 0 first, because it may prepare files."""
        if self.ranks.rank:
            self.ranks.each(None)
        timeout_s = self.ranks.timeout.total_seconds()
        source = open_source(self.recipe, split, self.seed, self.data, timeout_s, validates=True)
        if not self.ranks.rank:
            self.ranks.each(None)
        if source is None:
            raise ConfigError(f"recipe.data({split!r}): is None; return data, or name another split")
        if split == "train" and isinstance(source, Iterated) and is_used_up(source.given):  # training would use it up
            why = "the iterable can be walked only once, so it may have no end"
            raise DataError(f"recipe.data('train'): {why}; return a Dataset, or name another split")
        for part in by_prefix(source, split).values():
            refuse_other_replicas(part, split, self.data_rank, self.data_world)
        loader = Loader(
            Iterated(()), None, Split(self.micro * self.data_world, self.data_world), self.data, validation=source,
            rank=self.data_rank, seed=self.seed, timeout_s=timeout_s,
            device=self.ranks.device, ranks_on_node=self.ranks.place.local_world,
            collate=getattr(self.recipe, "collate", default_collate), weight=weight,
        )  # fmt: skip
        loader.takes_own = not self.asked
        return source, loader
