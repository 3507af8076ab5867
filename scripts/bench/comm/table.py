"""Makes tables and goals from turns: a table for each model, number of hosts and rate."""

import math
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from scripts.bench.comm.rank import Synthetic
from scripts.bench.comm.rows import BASES, DDP, ROWS, TORCHS, Row, Shapes
from scripts.bench.harness import Goal, Rounds, Turn, at_least, at_most, median_ratio
from scripts.bench.harness import Row as Cells

RATES = {"100mbit": 12.5e6, "1gbit": 125e6, "3gbit": 375e6, "unlimited": math.inf}  # bytes a second
COMPUTE_S = {"10M": 0.25, "30M": 0.37}  # of a step on one core, about: decides the number of steps of a turn


@dataclass(frozen=True)
class Config:
    hosts: int
    model: str
    rate: str

    def __str__(self) -> str:
        return f"{self.model}, {self.hosts} hosts, {self.rate}"

    @cached_property
    def shapes(self) -> Shapes:
        with torch.device("meta"):
            return [tuple(p.shape) for p in Synthetic(self.model).model().parameters()]

    def expected_s(self, row: Row) -> float:
        compute = COMPUTE_S[self.model] * max(1.0, self.hosts / (os.cpu_count() or 1))
        return compute + (row.sends(self.shapes, self.hosts) if row.sends else 0.0) / RATES[self.rate]

    def steps(self, row: Row, seconds: float) -> int:
        steps = min(24, max(2, round(seconds / self.expected_s(row))))
        return -(-steps // row.every) * row.every


class Result(Rounds):
    """The turns of each row under a config. Turns have seconds, CPU seconds and bytes sent, of a step."""

    def __init__(self, config: Config, turns: dict[str, list[Turn]], failed: dict[str, str]) -> None:
        super().__init__(turns, failed)
        self.config = config

    def whole(self) -> "Result | None":
        """Return the complete rounds; None if there are none, or if a row is missing that others are compared with."""
        rounds = min(map(len, self.turns.values()), default=0)
        if not rounds or not {*BASES[:2]} <= self.turns.keys() or not self.best(DDP):
            return None
        return Result(self.config, {name: turns[:rounds] for name, turns in self.turns.items()}, self.failed)

    def of_exact_limit(self, name: str) -> float:
        return median_ratio(self.values(name), map(max, *map(self.values, BASES[:2])))

    def best(self, names: Iterable[str]) -> str | None:
        return min((name for name in names if self.turns.get(name)), key=self.median, default=None)

    def formula(self, name: str) -> float | None:
        sends = ROWS[name].sends
        return None if sends is None else sends(self.config.shapes, self.config.hosts)

    def deviation(self, name: str) -> float | None:
        formula = self.formula(name)
        return None if formula is None else (self.median(name, "sent") / formula - 1) * 100

    def others(self, name: str) -> float:
        """Compute the cores that others kept busy. If they exceed a few hundredths, times are of no use."""
        own = self.config.hosts
        return statistics.median(max(0.0, t["busy"] - own * t["cpu"]) / t["seconds"] for t in self.turns[name])

    def rows(self) -> list[Cells]:
        ddp = self.best(DDP)
        assert ddp is not None
        part = f"{self.config}; {len(self.turns[BASES[0]])} rounds; speed-up over {ddp}"
        return self.table(part, "row", {
            "steps/s": lambda name: 1 / self.median(name),
            "speed-up": lambda name: 1 / self.ratio(name, ddp),
            "time / exact limit": self.of_exact_limit,
            "of no communication": lambda name: 1 / self.ratio(name, BASES[0]),
            "CPU s a step": lambda name: self.median(name, "cpu"),
            "cores used by others": self.others,
            "max / min": lambda name: max(self.values(name)) / min(self.values(name)),
            "MB sent": lambda name: self.median(name, "sent") / 1e6,
            "formula": lambda name: "" if (sent := self.formula(name)) is None else sent / 1e6,
            "off by %": lambda name: "" if (off := self.deviation(name)) is None else off,
        })  # fmt: skip

    def goals(self) -> list[Goal]:
        goals = []
        communication = self.ratio("all-reduce-alone", "no-communication")
        if "overlap" in self.turns and 0.5 <= communication <= 2:
            name = f"{self.config}: overlap, times the exact limit (communication is {communication:.2f} of compute)"
            goals.append(at_most(name, 1.10, self.of_exact_limit("overlap")))
        off = {name: abs(percent) for name in self.turns if (percent := self.deviation(name)) is not None}
        worst = max(off, key=lambda name: off[name])
        name = f"{self.config}: bytes, off the formula by percent, worst of all ({worst})"
        goals.append(at_most(name, 3, off[worst]))
        if self.config.rate == "100mbit":
            lossy = [name for name in self.turns if is_lossy(ROWS[name])]
            for names, bound in ((lossy, 0.92), (["topk", "overlap+topk"], 0.85), (["dgc", "overlap+dgc"], 0.85)):
                if best := self.best(names):
                    name = f"{self.config}: {best}, of the speed without communication"
                    goals.append(at_least(name, bound, 1 / self.ratio(best, BASES[0])))
        for own, torchs in TORCHS.items():
            if {own, torchs} <= self.turns.keys():
                goals.append(at_most(f"{self.config}: {own}, times {torchs}", 1.0, self.ratio(own, torchs)))
        return goals


def is_lossy(row: Row) -> bool:
    return row.sends is not None and any(not callback.exact for callback in row.build().values())
