"""The AUC against scikit-learn's: with ties, on one rank and on unequal parts of two, and where there is none."""

import math

import numpy as np
import pytest
import torch
from support.needs import needs
from support.ranks import run_ranks

from recipes.auc import AUC, auc
from trainer.comm.ranks import Ranks
from trainer.process.environment import Place

pytestmark = needs("sklearn")

CASES = {"no ties": 1e6, "ties": 5, "half of the samples tie": 1}


def samples(steps: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.random(1000) < 0.2
    scores = np.round((rng.normal(size=1000) + labels) * steps) / steps
    return scores.astype(np.float32), labels


@pytest.mark.parametrize("steps", CASES.values(), ids=CASES)
def test_it_is_scikit_learns(steps: float) -> None:
    from sklearn.metrics import roc_auc_score

    scores, labels = samples(steps)
    assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_four_pairs_by_hand() -> None:
    """The positives 0.5 and 0.2 against the negatives 0.5 and 0.1: a tie, two that are right, one that is wrong."""
    assert auc(np.array([0.5, 0.2, 0.5, 0.1]), np.array([True, True, False, False])) == (0.5 + 1 + 0 + 1) / 4


def test_scores_without_a_finite_difference_tie() -> None:
    scores = np.array([np.inf, np.inf, -np.inf, -np.inf])
    assert auc(scores, np.array([True, False, False, True])) == (0.5 + 1 + 0 + 0.5) / 4


@pytest.mark.parametrize(
    ("scores", "labels"), [([], []), ([1.0, 2.0], [1, 1]), ([1.0], [0]), ([1.0, math.nan, 2.0], [1, 0, 0])]
)
def test_without_pairs_or_with_nan_there_is_none(scores: list[float], labels: list[int]) -> None:
    metric = AUC()
    metric.update(torch.tensor(scores), torch.tensor(labels))
    assert math.isnan(metric.compute())


def of_rank(place: Place, parts: list[slice]) -> tuple[float, float]:
    ranks, (scores, labels), metric = Ranks(place, "cpu", "gloo", 60.0), samples(5), AUC()
    own = parts[place.rank]
    metric.update(torch.ones(3), torch.zeros(3))
    metric.reset()
    for start in range(own.start, own.stop, 64):
        batch = slice(start, min(start + 64, own.stop))
        metric.update(torch.from_numpy(scores[batch]), torch.from_numpy(labels[batch]).float())
    first = float(metric.compute())
    ranks.close()
    return first, float(len(metric.scores))


@pytest.mark.parametrize(
    "parts",
    [pytest.param([slice(0, 1000)], marks=pytest.mark.slow), [slice(0, 700), slice(700, 1000)]],
    ids=["1 rank", "2 ranks"],
)
def test_it_is_over_the_samples_of_all_ranks(parts: list[slice]) -> None:
    from sklearn.metrics import roc_auc_score

    scores, labels = samples(5)
    for found, _ in run_ranks(len(parts), of_rank, parts):
        assert found == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
