"""The loss of a step: a mean over items, and what is said of one that is not finite."""

import math
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor

from trainer.comm.ranks import Ranks
from trainer.metrics.train_loss import TrainLoss
from trainer.process.environment import Place


def losses(*values: float) -> list[Tensor]:
    return [torch.tensor(value) for value in values]


@pytest.fixture
def measured() -> TrainLoss:
    return TrainLoss(Ranks(Place(), "cpu", "auto", 60.0))


def test_the_mean_is_over_items_and_not_over_micro_batches(measured: TrainLoss) -> None:
    assert measured.measure(losses(1.0, 4.0), [1, 2], step=1) == {"train/loss": (1.0 + 2 * 4.0) / 3}
    assert (measured.finite_at, measured.lost) == (1, False)


def test_a_step_without_items_has_no_loss_and_says_nothing(measured: TrainLoss, caplog) -> None:
    assert math.isnan(measured.measure(losses(0.0), [0], step=1)["train/loss"])
    assert not measured.lost and not caplog.records


def test_a_loss_that_stops_being_finite_is_told_of_once(measured: TrainLoss, caplog) -> None:
    with caplog.at_level("WARNING", "echelon"):
        for step, value in enumerate((1.0, math.inf, math.nan), start=1):
            measured.measure(losses(value), [1], step)
            assert measured.lost == measured.spoils == (step > 1) and measured.ends == (step == 3)
    assert [record.getMessage() for record in caplog.records] == ["step 2: the loss is inf"]
    assert str(measured.refusal(3, "ckpt/r/step-00000001")) == (
        "train/loss is not finite since step 2; lower optimizer.lr, or check the data or the loss; "
        "trainer.resume=ckpt/r/step-00000001 restarts from the last finite checkpoint"
    )
    measured.measure(losses(1.0), [1], 4)
    assert (measured.finite_at, measured.lost) == (4, False)


def test_a_guard_may_skip_a_step_and_decides_how_many() -> None:
    guarded = TrainLoss(Ranks(Place(), "cpu", "auto", 60.0), guarded=True)
    for step, value in enumerate((1.0, math.inf, math.nan), start=1):
        guarded.measure(losses(value), [1], step)
        assert guarded.lost == (step == 3) and not guarded.spoils and not guarded.ends


def test_one_that_was_never_finite_ends_the_run(measured: TrainLoss) -> None:
    measured.measure(losses(math.nan), [1], step=1)
    assert measured.lost
    assert str(measured.refusal(4, "")).startswith("train/loss was finite at no logged step up to step 4; lower optim")


def measured_by(place: Place) -> tuple[dict[str, float], int]:
    """And how many exchanges that took."""
    ranks = Ranks(place, "cpu", "auto", 60.0)
    gather, calls = ranks.gather, list[Any]()
    ranks.gather = lambda *given: (calls.append(given), gather(*given))[1]  # pyright: ignore[reportAttributeAccessIssue]
    largest = (lambda: (5.0, 2.0, 3.0)[place.rank], lambda values: {"largest": max(values)})
    both = (lambda: [place.rank, 1], lambda values: {"ranks": sum(a for a, _ in values), "ones": values[0][1]})
    found = TrainLoss(ranks).measure(losses(1.0 + place.rank), [1], 1, [largest, both])
    exchanges = len(calls)
    ranks.leave()
    return found, exchanges


def test_other_numbers_go_with_the_loss_and_are_combined_on_each_rank() -> None:
    assert run_ranks(3, measured_by) == [({"train/loss": 2.0, "largest": 5.0, "ranks": 3, "ones": 1}, 1)] * 3
