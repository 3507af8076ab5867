"""Reads comm.jsonl: bytes, time and bandwidth of each collective and bucket, over the run and its ranks."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.tools.report.lines import Lines, number

MOST = 500  # collectives and buckets


@dataclass
class Exchange:
    """The calls of a collective for one bucket and level of the network, by all ranks."""

    collective: str
    bucket: int | None
    level: str  # empty where the file has none
    calls: float = 0.0
    bytes: float = 0.0  # of all calls
    timed: float = 0.0  # calls whose seconds are known
    seconds: float = 0.0  # of the timed calls
    moved: float = 0.0  # seconds times algorithm bandwidth
    on_bus: float = 0.0  # seconds times bus bandwidth
    by_rank: dict[int, float] = field(default_factory=dict)  # seconds

    @property
    def algbw(self) -> float:
        """Mean bytes/s, weighted by time."""
        return self.moved / self.seconds if self.seconds else float("nan")

    @property
    def busbw(self) -> float:
        return self.on_bus / self.seconds if self.seconds else float("nan")

    @property
    def slowest(self) -> int | None:
        """The rank that spent the most time in it; None if no call was timed."""
        return max(self.by_rank, key=self.by_rank.__getitem__, default=None)


def read_comm(path: Path) -> tuple[list[Exchange], str]:
    """Return the exchanges, the longest first, and a note on what is missing."""
    found: dict[tuple[str, int | None, str], Exchange] = {}
    lines, left_out = Lines(path), 0
    for line in lines:
        bucket, rank = line.get("bucket"), line.get("rank")
        count, seconds, size = (number(line.get(key)) for key in ("count", "seconds", "bytes"))
        level = str(line.get("level") or "")[:80]
        key = (str(line.get("collective"))[:80], bucket if type(bucket) is int else None, level)
        if not (count > 0 and size >= 0) or seconds < 0 or (key not in found and len(found) >= MOST):
            left_out += 1
            continue
        one = found.setdefault(key, Exchange(*key))
        one.calls, one.bytes = one.calls + count, one.bytes + size * count
        if seconds == seconds:
            add_time(one, rank if type(rank) is int else 0, count, seconds, line)
    note = f"{path.name}: {left_out} line(s) are odd, and left out" if left_out else lines.note
    return sorted(found.values(), key=lambda one: -one.seconds), note


def add_time(one: Exchange, rank: int, count: float, seconds: float, line: dict[str, Any]) -> None:
    """Add `count` calls of `seconds` on average."""
    time = seconds * count
    one.timed, one.seconds = one.timed + count, one.seconds + time
    algbw, busbw = (number(line.get(key)) for key in ("algbw", "busbw"))
    one.moved += time * algbw if 0 < algbw < math.inf else 0.0
    one.on_bus += time * busbw if 0 < busbw < math.inf else 0.0
    one.by_rank[rank] = one.by_rank.get(rank, 0.0) + time
