"""Reads metrics.jsonl: the curves, and the last, smallest and largest value of each metric."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.tools.report.downsample import Array, Ranges
from trainer.tools.report.lines import Lines, number

CHUNK = 1 << 15  # lines that are converted at once
MOST_METRICS = 400


class At(NamedTuple):
    value: float
    step: int


NONE = At(float("nan"), 0)


@dataclass
class Metric:
    ranges: Ranges
    last: At = NONE
    low: At = NONE
    high: At = NONE
    count: int = 0
    bad: int = 0  # values that are not finite

    def add(self, steps: Array, values: Array) -> None:
        """Add values (n) of increasing steps (n)."""
        self.ranges.add(steps, values)
        self.count += len(values)
        if steps[-1] >= self.last.step:  # lines that also have other metrics are converted apart
            self.last = At(float(values[-1]), int(steps[-1]))
        finite = np.isfinite(values)
        self.bad += int((~finite).sum())
        if finite.any():
            low = int(np.argmin(np.where(finite, values, np.inf)))
            high = int(np.argmax(np.where(finite, values, -np.inf)))
            if not values[low] >= self.low.value:
                self.low = At(float(values[low]), int(steps[low]))
            if not values[high] <= self.high.value:
                self.high = At(float(values[high]), int(steps[high]))


@dataclass
class Metrics:
    """A file's metrics in order of appearance. `note` is one line on what is missing."""

    by_name: dict[str, Metric] = field(default_factory=dict)
    note: str = ""
    last_step: int = 0

    def add(self, names: Sequence[str], rows: list[list[Any]], most: int) -> None:
        """Add lines with the same names. A value that is no number counts as not finite."""
        table = as_table(rows, len(names))
        steps = table[:, names.index("step")]
        self.last_step = max(self.last_step, int(steps[-1]))
        for column, name in enumerate(names):
            if name == "step":
                continue
            if name not in self.by_name and len(self.by_name) >= MOST_METRICS:
                self.note = f"metrics.jsonl: has more than {MOST_METRICS} metrics; the others are left out"
                continue
            self.by_name.setdefault(name, Metric(Ranges(most))).add(steps, table[:, column])


def read_metrics(path: Path, most: int) -> Metrics:
    """Read the file in a stream, in bounded memory. A curve keeps `most` points."""
    found, lines = Metrics(), Lines(path)
    pending: dict[tuple[str, ...], list[list[Any]]] = {}
    for line in lines:
        pending.setdefault(tuple(line), []).append(list(line.values()))
        if lines.count % CHUNK == 0:
            flush(found, pending, most)
    flush(found, pending, most)
    found.note = "; ".join(filter(None, [lines.note, found.note]))
    return found


def flush(found: Metrics, pending: dict[tuple[str, ...], list[list[Any]]], most: int) -> None:
    for names, rows in pending.items():
        found.add(names, rows, most)
    pending.clear()


def as_table(rows: list[list[Any]], width: int) -> Array:
    """Return rows of JSON values as a table of floats (rows, width)."""
    try:
        table = np.array(rows, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        table = None
    if table is None or table.shape != (len(rows), width):
        table = np.array([[number(value) for value in row] for row in rows], dtype=np.float64)
    return table
