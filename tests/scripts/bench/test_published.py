"""The cost model against published scaling: 12 points of GPUs, 3 of TPUs."""

import statistics

from scripts.bench.published import CASES, bert, compare
from trainer.cost.messages import elements


def test_the_models_have_the_papers_parameters() -> None:
    assert 108e6 < elements(bert(768, 12)) < 112e6 and 330e6 < elements(bert(1024, 24)) < 340e6


def test_predictions_are_near_what_was_published() -> None:
    errors = [abs(row["error, %"]) for case in CASES for row in compare(case)]
    assert len(errors) == 15 and statistics.median(errors) < 6 and max(errors[:12]) < 10
