"""The cost model against the committed measurements of scripts.bench.comm: every row of every table."""

from dataclasses import astuple

import pytest

from scripts.bench.cost_model import DOCS, codecs, compare, goals, shapes, tables
from trainer.cost.messages import elements

TABLES = list(tables((DOCS / "comm.md").read_text()))
COSTS = codecs((DOCS / "codecs.md").read_text())


def test_the_tables_are_read() -> None:
    assert len(TABLES) >= 12 and {str(table) for table in TABLES} >= {"10M, 4 hosts, 1gbit", "30M, 2 hosts, 3gbit"}
    assert TABLES[0].rows["ddp-25"]["CPU s a step"] == 0.299


def test_the_model_has_as_many_parameters_as_the_measured_one() -> None:
    assert 4 * elements(shapes("10M")) == pytest.approx(40.569e6, rel=1e-4)
    assert elements(shapes("30M")) == 29_703_680


def test_codecs_are_read() -> None:
    copy_s = 6.38e-3 / 97.4e6
    assert astuple(COSTS["bf16"]) == pytest.approx((1.503 * copy_s, 0.0))
    assert astuple(COSTS["topk"]) == pytest.approx(((7.414 - 2 * 0.651) * copy_s, 0.651 * copy_s))


def test_bytes_are_those_of_the_tables() -> None:
    errors = [row["MB, error, %"] for table in TABLES for row in compare(table, COSTS)]
    assert max(map(abs, errors)) < 1  # the tables round to a kilobyte


def test_median_errors_are_under_ten_percent() -> None:
    made = goals([compare(table, COSTS) for table in TABLES])
    assert not [goal for goal in made if not goal.met]


def test_half_the_bandwidth_behind_the_model_s_back_is_seen() -> None:
    """The errors are no accident: a link that is told twice as fast makes the model wrong."""
    table = next(table for table in TABLES if str(table) == "10M, 2 hosts, 1gbit")
    table.rows["all-reduce-alone"]["steps/s"] *= 2
    errors = [row["error, %"] for row in compare(table, COSTS) if row["row"].startswith("ddp")]
    table.rows["all-reduce-alone"]["steps/s"] /= 2
    assert max(errors) < -15
