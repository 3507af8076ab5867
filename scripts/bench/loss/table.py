"""Makes the table and the goals from curves and times: when a loss was reached, and after how many seconds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.bench.harness import Goal, Rounds, at_most, median_ratio
from scripts.bench.harness import Row as Cells
from scripts.bench.loss.methods import METHODS

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
    """The curves of all methods, and the timed steps on the slow link: also of "", without communication.

    `steps` is the number of bare DDP's steps. If `real`, the curves and their seconds are from the slow link.
    """

    title: str
    steps: int
    curves: Mapping[str, Curve]
    turns: Rounds
    real: bool = False

    def walls(self, name: str, step: float) -> list[float]:
        if self.real:
            steps, _, seconds = zip(*self.curves[name])
            return [float(np.interp(step, [0, *steps], [0.0, *seconds]))] * len(self.turns.turns[""])
        plain = min(step, METHODS[name].plain)
        own = self.turns.values(name)
        ddp = self.turns.values("ddp") if plain else own
        return [plain * bare + (step - plain) * each for bare, each in zip(ddp, own, strict=True)]

    def names(self) -> list[str]:
        return [name for name in self.curves if self.real or name in self.turns.turns]

    def loss(self, name: str) -> float:
        return self.curves[name][-1][1]

    def arrival(self, name: str) -> tuple[float, float, float] | None:
        """Find when DDP's final loss was reached: the step, the seconds, and these over `free_s`; None if never."""
        step = reached(self.curves[name], self.loss("ddp"))
        if step is None:
            return None
        walls, free = self.walls(name, step), [self.steps * each for each in self.turns.values("")]
        return step, statistics.median(walls), median_ratio(walls, free)

    def rows(self) -> list[Cells]:
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

    def free_s(self) -> float:
        return self.steps * self.turns.median("")

    def draw(self, file: Path) -> None:
        """Write an SVG of losses over the logarithm of time; dashed lines mark `free_s` and DDP's loss."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9.2, 4.6), layout="constrained")
        axes = figure.subplots()
        for name in self.names():
            steps, losses, _ = zip(*self.curves[name])
            axes.plot([statistics.median(self.walls(name, step)) for step in steps], losses, label=name)
        axes.axvline(self.free_s(), color="grey", linestyle="--")
        axes.axhline(self.loss("ddp"), color="grey", linestyle="--")
        axes.set(xscale="log", xlabel="seconds of training", ylabel="validation loss")
        figure.legend(loc="outside right upper")
        figure.savefig(file, format="svg", metadata={"Title": self.title})
