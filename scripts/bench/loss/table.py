"""Makes the table and the goals from curves and times: when a loss was reached, and after how many seconds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scripts.bench.report import Goal, at_most, median_ratio
from scripts.bench.report import Row as Cells

Curve = Sequence[tuple[int, float, float]]  # step, validation loss, seconds of training until then
WITHIN = ("dgc", "powersgd", "int8", "diloco")  # 1 % of DDP's final loss


def reached(curve: Curve, loss: float) -> float | None:
    """Compute the step at which `loss` was first reached, on straight lines between validations; None if never.

    The curve begins with the first validation, so the step is not before it.
    """
    last_step, last = 0, math.inf
    for step, here, _ in curve:
        if here <= loss:
            return step if last == math.inf else last_step + (step - last_step) * (last - loss) / (last - here)
        last_step, last = step, here
    return None


@dataclass
class Outcome:
    """The curves of all methods, and the seconds of their steps on the slow link.

    `steps` is the number of bare DDP's steps. `seconds` has the seconds of a step by round, for each method, and for ""
    without communication. `plain` has the number of steps that a method trains as bare DDP does. If `real`, the curves
    and their seconds are from the slow link.
    """

    title: str
    steps: int
    curves: Mapping[str, Curve]
    seconds: Mapping[str, Sequence[float]]
    plain: Mapping[str, int]
    real: bool = False

    def walls(self, name: str, step: float) -> list[float]:
        """Compute the seconds until `step`, by round."""
        if self.real:
            steps, _, seconds = zip(*self.curves[name])
            return [float(np.interp(step, [0, *steps], [0.0, *seconds]))] * len(self.seconds[""])
        plain = min(step, self.plain.get(name, 0))
        own = self.seconds[name]
        ddp = self.seconds["ddp"] if plain else own
        return [plain * bare + (step - plain) * each for bare, each in zip(ddp, own, strict=True)]

    def names(self) -> list[str]:
        return [name for name in self.curves if self.real or name in self.seconds]

    def loss(self, name: str) -> float:
        return self.curves[name][-1][1]

    def arrival(self, name: str) -> tuple[float, float, float] | None:
        """Find when DDP's final loss was reached: the step, the seconds, and these over `free_s`; None if never."""
        step = reached(self.curves[name], self.loss("ddp"))
        if step is None:
            return None
        walls, free = self.walls(name, step), [self.steps * each for each in self.seconds[""]]
        return step, statistics.median(walls), median_ratio(walls, free)

    def table(self) -> list[Cells]:
        rows = []
        for name in self.names():
            relative, steps = self.loss(name) / self.loss("ddp"), self.curves[name][-1][0]
            wall_s = statistics.median(self.walls(name, steps))
            never = (f"never: {100 * (relative - 1):.2g} % above", "", "")
            step, after_s, ratio = self.arrival(name) or never
            rows.append(
                {
                    "part": self.title,
                    "method": name,
                    "steps": steps,
                    "final loss": self.loss(name),
                    "/ DDP's": relative,
                    "s a step": wall_s / steps,
                    "wall s": wall_s,
                    "DDP's loss at step": step,
                    "after s": after_s,
                    "/ free": ratio,
                }
            )
        wall_s = self.free_s()
        free = {"method": "no communication", "steps": self.steps, "s a step": wall_s / self.steps, "wall s": wall_s}
        return [*rows, {**dict.fromkeys(rows[0], ""), "part": self.title, **free}]

    def goals(self) -> list[Goal]:
        arrivals = {name: arrival[2] for name in self.names() if (arrival := self.arrival(name))}
        best = min(arrivals, key=lambda name: arrivals[name])
        name = f"{best}, the best, at DDP's final loss: times what DDP's steps take without communication"
        goals = [at_most(name, 1.25, arrivals[best])]
        for name in WITHIN:
            if name in self.names():
                goals.append(at_most(f"{name}, final loss, times DDP's", 1.01, self.loss(name) / self.loss("ddp")))
        return goals

    def lines(self) -> dict[str, list[tuple[float, float]]]:
        """Return seconds and loss at each validation, for each method."""
        return {
            name: [(statistics.median(self.walls(name, step)), loss) for step, loss, _ in self.curves[name]]
            for name in self.names()
        }

    def free_s(self) -> float:
        """Compute the seconds of all DDP's steps without communication."""
        return self.steps * statistics.median(self.seconds[""])
