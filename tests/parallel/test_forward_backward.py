"""The gradient of a step depends on its samples alone, not on how they were split; one graph is kept at a time."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.quick import quick
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import default_collate
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.checks.recipe import CheckedLoss
from trainer.config.options import DataOptions, Options
from trainer.data.batch import Micro, Step
from trainer.data.parts import Parts
from trainer.data.sampling.order import Ref
from trainer.parallel.forward_backward import Accumulate, weigh_loss
from trainer.parallel.strategy import SingleDevice
from trainer.precision import Precision
from trainer.process.environment import Place
from trainer.trainer import Trainer


class Record(Callback):
    def __init__(self) -> None:
        self.gradients: list[np.ndarray] = []
        self.refs: list[tuple[int, ...]] = []

    def on_before_optimizer_step(self, trainer) -> None:
        self.gradients.append(np.concatenate([p.grad.flatten().numpy().copy() for p in trainer.parameters]))
        self.refs.append([tuple(ref) for ref in trainer.data.refs])
        self.weight = trainer.weight


class Sparse(Toy):
    """In most samples nothing counts: many a micro-batch has weight 0, and the mean over it is NaN."""

    def collate(self, samples):
        batch = default_collate(samples)
        batch["mask"] *= batch["x"][:, :1] < 0.1
        return batch


def gradients(place: Place, accumulate: int, recipe: type[Toy]) -> tuple[list[np.ndarray], list[Any], int]:
    record = Record()
    trainer = Trainer(
        recipe(dtype="float64"),  # 1 to 4 outputs count in a sample, so ranks' weights differ
        {"record": record},
        batch=12,
        accumulate=accumulate,
        options=Options(max_steps=3, log_every_steps=1, nodes="1:8"),  # so that parts may differ by a sample
        data=DataOptions(workers=0, shuffle_shards=5, shuffle_window=4),
        place=place,
    )
    trainer.fit()
    assert np.isfinite(trainer.last_metrics["train/loss"])
    return record.gradients, record.refs, record.weight


@pytest.mark.parametrize("recipe", [Toy, Sparse])
@pytest.mark.parametrize(("world", "accumulate"), quick([(1, 2), (2, 1), (3, 2), (2, 2), (3, 1), (5, 2)], 3))
def test_gradients_do_not_depend_on_the_split(world, accumulate, recipe, tmp_path):
    whole, samples, weight = run_ranks(1, gradients, 1, recipe)[0]
    split = run_ranks(world, gradients, accumulate, recipe)
    for step in range(3):
        union = sorted(ref for _, refs, _ in split for ref in refs[step])
        assert union == sorted(samples[step])
        for rank_gradients, _, rank_weight in split:
            np.testing.assert_allclose(rank_gradients[step], whole[step], rtol=1e-10, atol=1e-14)
            assert rank_weight == weight


def test_means_of_ranks_are_weighed_so_that_their_mean_is_that_of_all_items():
    """Two ranks with 3 and 1 items, whose means are 2 and 10: the mean over all 4 items is 4."""
    assert (weigh_loss(2.0, 3 * 2, 4) + weigh_loss(10.0, 1 * 2, 4)) / 2 == 4.0
    loss = torch.tensor(2.0)
    assert weigh_loss(loss, 4, 4) is loss  # no bit changes where nothing is to be weighed
    assert weigh_loss(loss, 0, 4) == 0.0


def test_the_last_micro_batch_reduces_and_only_its_loss_has_a_graph():
    strategy, syncs = SingleDevice(nn.Linear(1, 1, bias=False)), []
    weight = strategy.parameters[0]

    def loss_of(model: nn.Module, batch: float) -> Tensor:
        syncs.append(strategy.syncing)
        return model(torch.tensor([batch])).sum()

    loss = CheckedLoss(loss_of, weight=lambda batch: 1)
    accumulate = Accumulate(loss, strategy, GradScaler("cpu", enabled=False))
    losses = accumulate(Micros([(1.0, 1), (5.0, 3), (math.nan, 0)]), lambda: 4)
    assert syncs == [False, False, True]
    assert weight.grad is not None and weight.grad.item() == (1 * 1.0 + 3 * 5.0) / 4
    assert [loss.requires_grad for loss in losses] == [False, False, True] and losses[2] == 0.0


class Micros:
    """A step's micro-batches with their weights."""

    reduces = True

    def __init__(self, batches: list[tuple[float, int]]) -> None:
        self.batches, self.weights = batches, [weight for _, weight in batches]

    def __iter__(self) -> Iterator[tuple[float, int]]:
        return iter(self.batches)


def test_an_error_in_a_part_of_a_batch_is_the_recipes_own():
    def fails(model: nn.Module, batch: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("injected")

    device = torch.device("cpu")
    run = Accumulate(CheckedLoss(fails, len), SingleDevice(nn.Linear(1, 1)), Precision("fp32", device).scaler)
    for kind, refs in ((lambda step: Parts(step, 2, len, "auto_batch"), []), (lambda step: step, [Ref(0, 0, 0)])):
        with pytest.raises(torch.OutOfMemoryError, match="injected") as caught:
            run(kind(Step([Micro(torch.ones(4, 1), 4, [Ref(0, 0, 0)], [])])), lambda: 4)
        assert caught.value.refs == refs  # pyright: ignore[reportAttributeAccessIssue]
