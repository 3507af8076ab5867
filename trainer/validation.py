"""Metrics over the validation data: sums and counts, so that unequal batches and ranks weigh what they should."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.data.source import Samples

if TYPE_CHECKING:
    from trainer.trainer import Trainer


@torch.no_grad()
def evaluate(trainer: "Trainer", source: Samples | Iterable[Any]) -> dict[str, float]:
    """The recipe's metrics, or its loss, by `trainer.eval_model` over all of `source`. A collective; ranks' parts may
    be unequal or empty, for the model is not DDP's."""
    totals: dict[str, list[Any]] = {}
    training = [module for module in trainer.eval_model.modules() if module.training]  # a recipe may freeze some
    trainer.eval_model.eval()
    for batch, weight, _ in trainer.loader.validate(source):
        metrics = trainer.precision.cast(batch_metrics)(trainer, batch, weight)
        for name, (total, count) in metrics.items():
            sums = totals.setdefault(name, [0.0, 0])
            sums[0] += total.double()
            sums[1] += count
    for module in training:
        module.training = True
    ranks = trainer.ranks.gather({name: [float(total), count] for name, (total, count) in totals.items()})
    names = {name: None for rank in ranks for name in rank}  # in order; a rank may have had no batch
    both = {name: [sum(rank[name][i] for rank in ranks if name in rank) for i in (0, 1)] for name in names}
    return {f"val/{name}": total / count for name, (total, count) in both.items()}


def batch_metrics(trainer: "Trainer", batch: Any, weight: int) -> dict[str, tuple[Tensor, int]]:
    if hasattr(trainer.recipe, "metrics"):
        return trainer.recipe.metrics(trainer.eval_model, batch)
    return {"loss": (trainer.recipe.loss(trainer.eval_model, batch) * weight, weight)}
