"""Metrics of a file: the last, smallest and largest value with their steps, whatever the lines have."""

import json
import math
from pathlib import Path

import pytest
from support.run_files import long_metrics, write_lines

from trainer.tools.report import metrics
from trainer.tools.report.metrics import read_metrics


def test_last_smallest_and_largest(tmp_path):
    file = tmp_path / "metrics.jsonl"
    write_lines(file, [{"step": n, "train/loss": v} for n, v in ((1, 4.0), (2, 1.5), (3, 9.0), (4, 2.0))])
    found = read_metrics(file, 100).by_name["train/loss"]
    assert (found.last, found.low, found.high) == ((2.0, 4), (1.5, 2), (9.0, 3))
    assert (found.count, found.bad) == (4, 0)


def test_the_last_value_is_that_of_the_last_step_whatever_is_beside_it(tmp_path):
    file = tmp_path / "metrics.jsonl"
    write_lines(file, [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0, "b": 0.0}, {"step": 3, "a": 3.0}])
    assert read_metrics(file, 100).by_name["a"].last == (3.0, 3)


def test_values_that_are_not_finite(tmp_path):
    """Null, NaN as Python writes it, and what is no number."""
    file = tmp_path / "metrics.jsonl"
    lines = [{"step": n, "a": v} for n, v in enumerate([1.0, None, math.nan, math.inf, "x", [1], {"b": 2}, True, 3.0])]
    write_lines(file, lines)
    found = read_metrics(file, 100).by_name["a"]
    assert (found.last, found.low, found.high, found.bad) == ((3.0, 8), (1.0, 0), (3.0, 8), 7)
    write_lines(file, lines[:-1])
    assert math.isnan(read_metrics(file, 100).by_name["a"].last.value)


def test_chunks_do_not_matter(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    long_metrics(file, 3000)
    whole = read_metrics(file, 100)
    monkeypatch.setattr(metrics, "CHUNK", 77)
    pieces = read_metrics(file, 100)
    assert list(whole.by_name) == list(pieces.by_name)
    for name, one in whole.by_name.items():
        other = pieces.by_name[name]
        assert (one.last, one.low, one.high) == (other.last, other.low, other.high)
        assert one.ranges.mean == pytest.approx(other.ranges.mean)
    assert whole.by_name["train/loss"].high == (99.0, 1000)


def test_lines_of_many_kinds_need_no_memory(tmp_path):
    """A stranger's file may name a new metric in each line."""
    file = tmp_path / "metrics.jsonl"
    with Path(file).open("w") as lines:
        for n in range(2000):
            lines.write(json.dumps({"step": n, f"m{n}": 1.0}) + "\n")
    found = read_metrics(file, 100)
    assert len(found.by_name) == metrics.MOST_METRICS
    assert found.note == f"metrics.jsonl: has more than {metrics.MOST_METRICS} metrics; the others are left out"
    assert found.last_step == 1999
