"""Corrects the cost model by measured trials: factors on links, passes and codecs, then one for each family."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

from trainer.cost.machine import CodecCost, Link, Machine
from trainer.cost.setup import Setup
from trainer.cost.workload import Choice, Prediction, Workload
from trainer.tools.cost_model.predict import chosen, with_data, without_data
from trainer.tools.cost_model.read import READ, read

NOISE = 0.03  # of a measured step, as a share
OTHER = 0.1  # spread of the fixed seconds that the model has missed, as a share of today's step
TRUST = {"across": 0.7, "inside": 0.7, "compute": 0.2, "codec": 0.4, "optimizer": 0.4}  # spreads of the logarithms
STEPS = (0.8, 0.3, 0.1, 0.03)  # of the search for factors, in logarithms
SHRINK = 0.5  # share of a family's mean residual that its other choices get with one trial
SIMULATED = READ - {"data.workers"} | {"nccl.algo"}  # settings that change more than the wait for data


@dataclass(frozen=True)
class Model:
    """The cost model with its corrections."""

    machine: Machine
    workload: Workload
    batch: int
    today_s: float  # measured seconds of today's step, the unit of the correction `other`
    whole: Callable[[Choice], Choice]  # returns all callbacks and settings of today's config with a choice
    family: Callable[[Choice], str]
    factors: Mapping[str, float] = field(default_factory=dict)  # logarithms, by the names of `TRUST`
    residuals: Mapping[str, float] = field(default_factory=dict)  # by family, of log(measured / predicted)
    known: dict[str, Prediction] = field(default_factory=dict, init=False)  # without the wait for data

    def predict(self, choice: Choice) -> Prediction:
        """Predict a step of today's config with a choice.

        Choices that differ only in data workers, or in settings that the model leaves out, are simulated once.
        """
        whole = self.whole(choice)
        setup = self._setup(whole, self.factors)
        simulated = {key: value for key, value in setup.settings.items() if key in SIMULATED}
        key = repr((whole.callbacks, simulated))
        if key not in self.known:
            self.known[key] = without_data(setup)
        found = with_data(setup, self.known[key])
        factor = math.exp(self.residuals.get(self.family(choice), 0.0))
        parts = {name: seconds * factor for name, seconds in found.parts.items()}
        return replace(found, step_s=found.step_s * factor, parts=parts)

    def _setup(self, whole: Choice, factors: Mapping[str, float]) -> Setup:
        """Return the machine and the workload with the factors applied."""
        by = {name: math.exp(factors.get(name, 0.0)) for name in TRUST}
        missed_s = max(0.0, factors.get("other", 0.0)) * self.today_s
        codecs = self.machine.codecs
        machine = replace(
            self.machine,
            across=slower(self.machine.across, by["across"]),
            inside=slower(self.machine.inside, by["inside"]),
            codecs={name: CodecCost(*(s * by["codec"] for s in astuple(cost))) for name, cost in codecs.items()},
        )
        work = self.workload
        passes = {name: getattr(work, name) * by["compute"] for name in ("forward_s", "backward_s", "pass_s")}
        work = replace(work, **passes, optimizer_s=work.optimizer_s * by["optimizer"], other_s=work.other_s + missed_s)
        return chosen(read(machine, work, whole, self.batch))

    def _step_s(self, whole: Choice, factors: Mapping[str, float]) -> float:
        setup = self._setup(whole, factors)
        return with_data(setup, without_data(setup)).step_s

    def correct(self, measured: Sequence[tuple[Choice, float]]) -> "Model":
        """Return the model with the most likely factors, given measured seconds of a step.

        Errors and factors are log-normal, with the spreads `NOISE` and `TRUST`.
        """
        wholes = [(self.whole(choice), seconds) for choice, seconds in measured]

        def loss(factors: Mapping[str, float]) -> float:
            errors = [math.log(seconds / self._step_s(whole, factors)) / NOISE for whole, seconds in wholes]
            prior = [factors[name] / spread for name, spread in {**TRUST, "other": OTHER}.items()]
            return sum(robust(error) for error in errors) + sum(value**2 for value in prior)

        factors = descend(loss, dict.fromkeys((*TRUST, "other"), 0.0) | dict(self.factors))
        by_family: dict[str, list[float]] = {}
        for (choice, seconds), (whole, _) in zip(measured, wholes, strict=True):
            residual = math.log(seconds / self._step_s(whole, factors))
            by_family.setdefault(self.family(choice), []).append(residual)
        weight = {name: len(values) / (len(values) + 1 / SHRINK - 1) for name, values in by_family.items()}
        residuals = {name: weight[name] * sum(values) / len(values) for name, values in by_family.items()}
        return replace(self, factors=factors, residuals=residuals)


def robust(error: float) -> float:
    """Return Huber's loss (1964), so that one outlier does not move every prediction."""
    return error**2 if abs(error) <= 3 else 6 * abs(error) - 9


def descend(loss: Callable[[Mapping[str, float]], float], start: dict[str, float]) -> dict[str, float]:
    """Minimise by ever smaller steps along one factor at a time (Hooke and Jeeves 1961)."""
    at, least = dict(start), loss(start)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for name in at:
                for change in (step, -step):
                    tried = {**at, name: at[name] + change}
                    if (found := loss(tried)) < least - 1e-9:
                        at, least, moved = tried, found, True
                        break
    return at


def slower(link: Link, factor: float) -> Link:
    return replace(link, latency_s=link.latency_s * factor, bytes_per_s=link.bytes_per_s / factor)


def in_words(factors: Mapping[str, float]) -> str:
    """Return the significant corrections in words."""
    names = {"across": "the link across", "inside": "the link inside", "compute": "the passes"}
    names |= {"codec": "codecs", "optimizer": "the optimizer"}
    found = [
        f"{names[name]}: {math.exp(value):.2f} times the time that was measured before the trials"
        for name, value in factors.items() if name in names and abs(value) > 0.15
    ]  # fmt: skip
    return "; ".join(found)
