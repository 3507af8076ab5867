"""Metrics over the validation data: sums and counts, so that unequal batches and ranks weigh what they should."""

from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import DistError

from trainer.checkpoint.retention import parse_best
from trainer.data.bad_samples import allowed
from trainer.data.source import Samples
from trainer.errors import ConfigError, DataError, nearest
from trainer.log import log

if TYPE_CHECKING:
    from trainer.trainer import Trainer


@torch.no_grad()
def evaluate(trainer: "Trainer") -> dict[str, float] | None:
    """The recipe's metrics, or its loss, by `trainer.eval_model` over all of the validation data. A collective;
    ranks' parts may be unequal or empty, for the model is not DDP's. None, on all ranks: a signal to stop has ended it.

    Raises:
        DataError: on all ranks, if nothing was counted on any, or more samples are bad than may be.
        DistError: where another rank has failed.
    """
    own: dict[str, Any] | None = {}
    bad: list[str] = []
    failure = None
    trainer.ranks.share_buffers(trainer.eval_model)
    try:
        own = sums(trainer, bad)
    except Exception as error:
        failure = error  # the other ranks wait for what this one has to say
    told = [own, len(bad), bad[:1], failure is not None]
    try:
        ranks, counts, firsts, failed = zip(*trainer.ranks.gather(told), strict=True)
    finally:
        if failure:
            raise failure
    if any(failed):
        raise DistError(f"rank {failed.index(True)} failed in validation")
    if None in ranks:
        return None
    if sum(counts):
        tell_bad(trainer, sum(counts), next(first[0] for first in firsts if first))
    if not any(ranks):
        raise DataError(
            "recipe.data('val'): gave no batch, or only such of weight 0; "
            "return what can be walked again for each validation: shards, a dataset or a list, not a generator"
        )
    names = {name: None for rank in ranks for name in rank}  # in order; a rank may have had no batch
    both = {name: [sum(rank[name][i] for rank in ranks if name in rank) for i in (0, 1)] for name in names}
    return {f"val/{name}": total / count for name, (total, count) in both.items()}


def sums(trainer: "Trainer", bad: list[str]) -> dict[str, Any] | None:
    """Of each metric, over this rank's part: the total, and the number of what it counts. None: this rank has heard a
    signal to stop, and leaves the rest."""
    totals: dict[str, list[Any]] = {}
    with closing(each_batch(trainer, bad)) as batches:
        for metrics in batches:
            if trainer.signals.name:
                return None
            trainer.heartbeat.beat()
            for name, (total, count) in metrics.items():
                if count:  # else the sum may be 0 / 0
                    both = totals.setdefault(name, [0.0, 0])
                    both[0] += total.double()
                    both[1] += count
    return {name: [float(total), count] for name, (total, count) in totals.items()}


@torch.no_grad()
def refuse_unknown_metrics(trainer: "Trainer") -> None:
    """Before the first step: what is to be watched must be among the metrics of validation. Where the recipe has
    metrics of its own, one micro-batch tells which. A collective.

    Raises:
        ConfigError: for one that is not, with the nearest that are.
    """
    watched = {f"callbacks.{name}.metric": c.metric for name, c in trainer.callbacks.items() if c.metric}
    if trainer.options.checkpoint.keep_best:
        watched["trainer.checkpoint.keep_best"] = parse_best(trainer.options.checkpoint.keep_best)[0]
    if not watched:
        return
    if trainer.plan.validation is None:
        key, name = watched.popitem()
        raise ConfigError(f"{key}={name}: the recipe's data('val') is None; give it validation data, or leave this out")
    known = {"val/loss"}
    if hasattr(trainer.recipe, "metrics"):
        own = [f"val/{name}" for name in next(each_batch(trainer, []), ())]
        known = {name for names in trainer.ranks.gather(own) for name in names}
    for key, name in watched.items():
        if name not in known:
            raise ConfigError(f"{key}={name}: this run's validation gives no such metric; {nearest(name, known)}")


def tell_bad(trainer: "Trainer", count: int, first: str) -> None:
    assert isinstance(trainer.plan.validation, Samples)
    samples = sum(trainer.plan.validation.counts)
    most = allowed(trainer.plan.data.max_bad, samples)
    if count > most:
        raise DataError(
            f"data.max_bad: {count} of {samples} samples of recipe.data('val') could not be read, and {most} may be; "
            f"the first: {first}"
        )
    if trainer.rank == 0:
        log.warning("validation: %d of %d samples were left out; the first: %s", count, samples, first)


def each_batch(trainer: "Trainer", bad: list[str]) -> Generator[dict[str, tuple[Tensor, int]]]:
    """Metrics of this rank's batches; of the samples that are in none, `bad` gets the reasons."""
    training = [module for module in trainer.eval_model.modules() if module.training]  # a recipe may freeze some
    trainer.eval_model.eval()
    try:
        for batch, weight, _, left_out in trainer.loader.validate():
            bad += [each.why for each in left_out]
            if batch is None:
                continue
            yield trainer.precision.cast(batch_metrics)(trainer, batch, weight)
    finally:
        for module in training:
            module.training = True


def batch_metrics(trainer: "Trainer", batch: Any, weight: int) -> dict[str, tuple[Tensor, int]]:
    if hasattr(trainer.recipe, "metrics"):
        return trainer.recipe.metrics(trainer.eval_model, batch)
    return {"loss": (trainer.recipe.loss(trainer.eval_model, batch) * weight, weight)}
