"""Judges the winner against today's config by pairs of short runs: speed, losses, memory, advice."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.tools.tune.time_to_loss import difference, drift

ROUNDING = {"fp32": 1e-3, "tf32": 1e-2}  # largest relative difference of losses that only round differently
NAMES = ("before", "after")
LEAST = 0.01  # share of a step from which on a phase is named
Seconds = Callable[[Mapping[str, Any]], float]
WAITS: dict[str, Seconds] = {  # advice about a share of the step -> its seconds in a result
    "data_wait": lambda result: result["phases"]["data"],
    "communication": lambda result: result["phases"]["communication"],
    "straggler": lambda result: result["spread_s"],
}
COARSE = 5e-2  # the same for precisions of 16 bits and fewer
USABLE = 0.95  # of a GPU's memory; validation and gaps between tensors need the rest


@dataclass(frozen=True)
class Verdict:
    """Whether the winner is recommended, and what was found; `faults` are the reasons against it."""

    recommended: bool
    gain: float  # today's seconds of a step over the winner's, the median over pairs
    findings: list[str]
    faults: list[str]


@dataclass(frozen=True)
class Judge:
    """The limits of a canary."""

    exact: bool  # both configs compute the same numbers, up to rounding
    random: bool  # other micro-batches draw other random numbers, so losses are equal only on average
    bound: float  # for a lossy config, the share by which its loss may be larger
    precision: str = "fp32"
    memory_bytes: float | None = None  # per rank; None: unknown

    def judge(self, pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> Verdict:
        """Judge pairs of results of `run_trial`, today's and the winner's, with a `score_s` each."""
        findings, faults = list[str](), list[str]()
        gain = self._speed(pairs, findings, faults)
        self._losses(pairs, findings, faults)
        self._memory(pairs, findings, faults)
        self._advice(pairs, findings, faults)
        findings += filter(None, (in_phases(name, [pair[i] for pair in pairs]) for i, name in enumerate(NAMES)))
        return Verdict(not faults, gain, findings, faults)

    def _speed(self, pairs: Sequence[Any], findings: list[str], faults: list[str]) -> float:
        """Require a win in each pair (sign test), and a median gain above the noise of equals."""
        before, after = ([pair[i]["score_s"] for pair in pairs] for i in (0, 1))
        gains = [a / b for a, b in zip(before, after)]
        gain, wins = statistics.median(gains), sum(g > 1 for g in gains)
        noise = spread(before)
        findings.append(
            f"step {statistics.median(p['step_s'] for p, _ in pairs):.4g} s before, "
            f"{statistics.median(p['step_s'] for _, p in pairs):.4g} s after; {gain:.3f} times as fast, "
            f"in {wins} of {len(pairs)} pairs (sign test, p = {p_value(wins, len(pairs)):.3f}); noise {noise:.1%}"
        )
        if wins < len(pairs):
            faults.append(f"faster in {wins} of {len(pairs)} pairs, and all are needed")
        if gain - 1 <= noise:
            faults.append(f"the gain of {gain - 1:.1%} is within the noise of {noise:.1%}")
        return gain

    def _losses(self, pairs: Sequence[Any], findings: list[str], faults: list[str]) -> None:
        curves = [zip(*zip(before["losses"], after["losses"])) for before, after in pairs]  # at equal steps
        measure = difference if self.exact and not self.random else drift
        each = [measure(*curve) for curve in curves]
        found = max(each) if not any(map(math.isnan, each)) else math.nan
        if self.exact and not self.random:
            limit = ROUNDING.get(self.precision, COARSE)
            findings.append(f"losses differ by at most {found:.2g} of their value (limit {limit:g}: rounding)")
        else:
            limit = self.bound
            findings.append(f"the loss is {found:+.2%} of today's at equal steps (limit +{limit:.2%}: tune.bound)")
        if not found <= limit:
            faults.append(f"the losses differ: {findings.pop()}")

    def _memory(self, pairs: Sequence[Any], findings: list[str], faults: list[str]) -> None:
        before, after = (max(pair[i]["memory_bytes"] for pair in pairs) for i in (0, 1))
        findings.append(f"memory of the fullest rank {before / 2**30:.2f} GiB before, {after / 2**30:.2f} GiB after")
        if why := too_full(before, after, self.memory_bytes):
            faults.append(f"the winner {why}")

    def _advice(self, pairs: Sequence[Any], findings: list[str], faults: list[str]) -> None:
        """Find what most of the winner's runs are advised and none of today's; the numbers differ each time.

        A slow rank must be the same one in most runs, because ranks that share cores take turns at being late. A wait
        is no fault if it takes as long as today, since it is a larger share of a shorter step.
        """
        before, after = ([{line["name"]: line for line in pair[i]["advice"]} for pair in pairs] for i in (0, 1))
        for name in dict.fromkeys(name for run in after for name in run):
            lines = [run[name] for run in after if name in run]
            _, alike = Counter(line["rank"] for line in lines).most_common(1)[0]
            words = f"{lines[-1]['text']}; try {lines[-1]['config']}"
            if any(name in run for run in before):
                findings.append(f"both are advised: {words}")
            elif 2 * alike <= len(pairs):
                several = "" if alike == len(lines) else ", of several ranks"
                findings.append(f"{len(lines)} of {len(pairs)} of the winner's runs are advised{several}: {words}")
            elif name in WAITS and takes_no_longer(WAITS[name], pairs):
                findings.append(f"the winner's run is advised, though it waits no longer than today's: {words}")
            else:
                faults.append(f"the winner's run is advised what today's is not: {words}")


def too_full(before: float, after: float, memory_bytes: float | None) -> str:
    """Return why a config takes too much memory: more than today's, and more than is usable; "" if it does not."""
    if memory_bytes is None or after <= max(before, USABLE * memory_bytes):
        return ""
    return f"takes {after / 2**30:.2f} of {memory_bytes / 2**30:.2f} GiB of memory, and {USABLE:.0%} are usable"


def takes_no_longer(seconds: Seconds, pairs: Sequence[Any]) -> bool:
    """Return whether a wait is at most `LEAST` of today's step longer; False if unknown."""
    if not all(result["phases"] for pair in pairs for result in pair):
        return False
    before, after = (statistics.median(seconds(pair[i]) for pair in pairs) for i in (0, 1))
    return after <= before + LEAST * statistics.median(pair[0]["phases"]["step"] for pair in pairs)


def in_phases(name: str, results: Sequence[Mapping[str, Any]]) -> str:
    """Return where the time of a step goes, according to `step_timer`; "" without one."""
    known = [result["phases"] for result in results if result["phases"]]
    if not known:
        return ""
    shares = {phase: statistics.median(each[phase] / each["step"] for each in known) for phase in known[0]}
    shown = sorted(((share, phase) for phase, share in shares.items() if phase != "step"), reverse=True)
    return f"step times {name}: {', '.join(f'{phase} {share:.0%}' for share, phase in shown if share >= LEAST)}"


def spread(values: Sequence[float]) -> float:
    """Return the relative standard error of the median of equals: 1.25 times that of the mean (Kendall)."""
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.25 * deviation / middle / math.sqrt(len(values))


def p_value(wins: int, pairs: int) -> float:
    """Return the probability of at least so many wins between equals."""
    return sum(math.comb(pairs, k) for k in range(wins, pairs + 1)) / 2**pairs
