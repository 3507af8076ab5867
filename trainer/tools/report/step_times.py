"""Reads step_times.jsonl: for each rank, the seconds of a step by part, over the run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.tools.report.lines import Lines, number

PARTS = (
    "data", "upload", "forward", "backward", "communication", "optimizer", "callbacks", "checkpoint", "validation",
)  # fmt: skip
COMPUTE = ("upload", "forward", "backward", "optimizer")  # phases that distinguish a slow rank from those that wait
CHUNK = 1 << 14  # lines, times ranks, that are converted at once
MOST_RANKS = 4096
LONGEST = 1e9  # of a step; more is no time

Table = NDArray[np.float64]


@dataclass
class RankTimes:
    """Spans of steps. A rank that joins later has no steps in earlier spans."""

    most: int
    last: Table = field(default_factory=lambda: np.empty(0))  # the last step of each span
    steps: Table = field(default_factory=lambda: np.empty((0, 0)))  # (spans, ranks)
    # By `PARTS`, then of the whole step (spans, ranks, parts + 1).
    seconds: Table = field(default_factory=lambda: np.empty((0, 0, len(PARTS) + 1)))

    @property
    def ranks(self) -> int:
        return self.steps.shape[1]

    def add(self, last: Table, steps: Table, seconds: Table) -> None:
        """Add spans of one line each."""
        ranks = max(self.ranks, steps.shape[1])
        self.last = np.concatenate([self.last, last])
        self.steps = np.concatenate([pad(self.steps, ranks), pad(steps, ranks)])
        self.seconds = np.concatenate([pad(self.seconds, ranks), pad(seconds, ranks)])
        while len(self.last) > 2 * self.most:
            self._halve()

    def _halve(self) -> None:
        starts = np.arange(0, len(self.last), 2)
        self.last = np.maximum.reduceat(self.last, starts)
        self.steps, self.seconds = np.add.reduceat(self.steps, starts), np.add.reduceat(self.seconds, starts)

    def close(self) -> None:
        """Merge down to `most` spans, fewer for many ranks."""
        while len(self.last) > max(1, min(self.most, self.most * 64 // max(64, self.ranks))):
            self._halve()

    def means(self) -> Table:
        """Return the mean seconds of a step, by rank and part, over the run (ranks, parts + 1)."""
        return self.seconds.sum(0) / np.maximum(self.steps.sum(0), 1)[:, None]


def pad(table: Table, ranks: int) -> Table:
    return np.pad(table, [(0, 0), (0, ranks - table.shape[1])] + [(0, 0)] * (table.ndim - 2))


def read_step_times(path: Path, most: int) -> tuple[RankTimes, str]:
    """Read the file in a stream, into at most `most` spans. Return the times, and a note on what is missing."""
    found, lines, odd = RankTimes(most), Lines(path), 0
    pending: list[Line] = []
    for line in lines:
        ranks, steps = ranks_of(line), number(line.get("steps"))
        if not ranks or not 0 < steps < 1 << 53:
            odd += 1
            continue
        new = Line(line["step"], steps, tuple(ranks[0]), [list(rank.values()) for rank in ranks])
        full = len(pending) * len(ranks) >= CHUNK
        if pending and (full or (new.names, len(ranks)) != (pending[0].names, len(pending[0].ranks))):
            found.add(*convert(pending))
            pending = []
        pending.append(new)
    if pending:
        found.add(*convert(pending))
    found.close()
    note = f"{path.name}: {odd} line(s) are odd, and left out" if odd else lines.note
    return found, note


class Line(NamedTuple):
    """A line of the file: the values of its ranks (ranks, names)."""

    step: int
    steps: float
    names: tuple[str, ...]
    ranks: list[list[Any]]


def ranks_of(line: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the ranks' objects; [] unless all have the same keys."""
    ranks = line.get("ranks")
    if not isinstance(ranks, list) or not 0 < len(ranks) <= MOST_RANKS or not isinstance(ranks[0], dict):
        return []
    keys = ranks[0].keys()
    same = "step" in keys and all(isinstance(rank, dict) and rank.keys() == keys for rank in ranks)
    return ranks if same else []


def convert(lines: list[Line]) -> tuple[Table, Table, Table]:
    """Return last steps (n), steps (n, ranks) and seconds (n, ranks, parts + 1) of n matching lines."""
    names, ranks = lines[0].names, len(lines[0].ranks)
    flat = [[number(value) for value in rank] for line in lines for rank in line.ranks]
    values = np.array(flat).reshape(len(lines), ranks, len(names))
    values = np.where((values >= 0) & (values < LONGEST), values, 0.0)
    own = np.zeros((len(lines), ranks, len(PARTS) + 1))
    for column, name in enumerate((*PARTS, "step")):
        if name in names:
            own[:, :, column] = values[:, :, names.index(name)]
    steps = np.array([line.steps for line in lines])
    last = np.array([line.step for line in lines], dtype=np.float64)
    return last, np.repeat(steps[:, None], ranks, axis=1), own * steps[:, None, None]
