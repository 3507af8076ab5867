"""Tries the most promising choices until no prediction beats the best measurement, or the time is over."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from trainer.callback import Role
from trainer.composition import kinds
from trainer.cost.workload import Choice
from trainer.tools.tune.candidates import unseen
from trainer.tools.tune.correction import Model
from trainer.tools.tune.team import OUT_OF_MEMORY, TrialFailed

GAIN = 0.02  # a choice has to promise this share to be worth a trial
ALIKE = 0.01  # predictions this close are ties: of such choices, the one that changes least is tried
DOUBT = 0.05  # most by which the model's own errors may make a prediction look worse than it is
HOPE = 0.25  # share of the passes, or of communication, that a change may save whose effect the model leaves out
OVER = "the budget is over"


@dataclass(frozen=True)
class Tried:
    """A trial. `predicted_s` predates it; `step_s` is None if it failed, for the reason `error`."""

    choice: Choice
    predicted_s: float
    step_s: float | None = None
    score_s: float | None = None  # what choices are ranked by: step_s, or the seconds to a loss
    error: str = ""

    @property
    def miss(self) -> float:
        """The prediction's error, relative to the measurement."""
        assert self.step_s is not None
        return self.predicted_s / self.step_s - 1


@dataclass
class Search:
    """A search among `choices`, starting from the trial of today's config."""

    model: Model
    choices: Sequence[Choice]
    measure: Callable[[Choice], tuple[float, float]]  # runs a trial: seconds of a step, score
    time_left: Callable[[], float]  # for trials
    note: Callable[[Tried, Model], Any]  # called with each finished trial
    cost_s: Callable[[], float]  # of a trial, apart from its steps
    steps: Callable[[Choice], int]  # of its trial
    tried: list[Tried]  # earlier trials, including an interrupted search's; the first is today's config

    def run(self) -> tuple[Tried, str]:
        """Return the best trial, and why the search ended."""
        while True:
            self.model = self.model.correct([(t.choice, t.step_s) for t in self.tried if t.step_s])
            best = self.best
            assert best.score_s is not None
            ranked = self._ranked()
            if not ranked:
                return best, "no other choice is left"
            if ranked[0][0] >= best.score_s * (1 - GAIN):
                return best, "no other choice is predicted to be faster"
            _, step_s, choice = simplest(ranked)
            if self.cost_s() + self.steps(choice) * step_s > self.time_left():
                return best, OVER
            self.try_out(choice)

    def try_out(self, choice: Choice) -> Tried:
        predicted_s = self.model.predict(choice).step_s
        try:
            step_s, score_s = self.measure(choice)
            tried = Tried(choice, predicted_s, step_s, score_s)
        except TrialFailed as error:
            tried = Tried(choice, predicted_s, error=str(error))
        self.tried.append(tried)
        self.note(tried, self.model)
        return tried

    @property
    def best(self) -> Tried:
        return min((t for t in self.tried if t.score_s is not None), key=lambda t: t.score_s or 0.0)

    def _ranked(self) -> list[tuple[float, float, Choice]]:
        """Return the remaining choices with their hoped-for score and predicted step, the best first."""
        doubt, (limit, over) = min(DOUBT, self._spread()), self._memory_limit()
        failed = [t.choice for t in self.tried if t.error and t not in over]
        measured = {name for t in self.tried for name in (*t.choice.callbacks, *unseen(t.choice))}
        blamed, found = self._blamed(failed), []
        for choice in self.choices:
            if self._ruled_out(choice, failed, blamed) or not self._recomputes_for_a_reason(choice, limit):
                continue
            predicted = self.model.predict(choice)
            if predicted.memory_bytes >= limit:
                continue
            unknown = {word.partition(": ")[0].removeprefix("callbacks.") for word in predicted.unknown} - measured
            hoped_s = HOPE * predicted.parts["compute"] if unknown & choice.callbacks.keys() else 0.0
            hoped_s += HOPE * predicted.parts["communication"] if unknown & set(unseen(choice)) else 0.0
            score_s = (predicted.step_s - hoped_s) * self._slowdown(choice) * (1 - doubt)
            found.append((score_s, predicted.step_s, choice))
        return sorted(found, key=lambda item: item[0])

    def _memory_limit(self) -> tuple[float, list[Tried]]:
        """Return the predicted bytes from which on a choice does not fit, and the trials beyond them.

        The machine may report its memory. A trial that ran out of memory also bounds it, if its choice is predicted to
        take more than every one that ran.
        """
        limit, short = self.model.machine.memory_bytes, [t for t in self.tried if ran_out(t.error)]
        ran = max((self._bytes(t.choice) for t in self.tried if t.step_s), default=0.0)
        over = [t for t in short if self._bytes(t.choice) > ran]
        limit = math.inf if limit is None else max(limit, math.nextafter(ran, math.inf))  # what ran fits
        return min([limit, *(self._bytes(t.choice) for t in over)]), over

    def _bytes(self, choice: Choice) -> float:
        return self.model.predict(choice).memory_bytes

    def _recomputes_for_a_reason(self, choice: Choice, limit: float) -> bool:
        """Return whether the choice recomputes nothing, or would not fit otherwise: recomputing costs time."""
        plain = {name: knobs for name, knobs in choice.callbacks.items() if kinds()[name].role != Role.RECOMPUTE}
        if len(plain) == len(choice.callbacks):
            return True
        if limit == math.inf:
            return False
        return self._bytes(Choice(plain, choice.settings)) >= limit

    def _ruled_out(self, choice: Choice, failed: Sequence[Choice], blamed: Set[tuple[str, Any]]) -> bool:
        """Return whether the choice was tried or extends a failed one, or its family or a setting has failed twice."""
        more = any(one.callbacks.items() <= choice.callbacks.items() and one.settings.items() <= choice.settings.items()
                   for one in failed)  # fmt: skip
        alike = [one for one in failed if one.callbacks and self.model.family(one) == self.model.family(choice)]
        tried = any(t.choice == choice for t in self.tried)
        return more or len(alike) >= 2 or tried or not blamed.isdisjoint(choice.settings.items())

    def _blamed(self, failed: Sequence[Choice]) -> Set[tuple[str, Any]]:
        """Return the settings of at least two failed choices that no successful one had."""
        ran = {item for t in self.tried if t.step_s for item in t.choice.settings.items()}
        times = Counter(item for one in failed for item in one.settings.items())
        return {item for item, count in times.items() if count >= 2 and item not in ran and item[0] != "accumulate"}

    def _slowdown(self, choice: Choice) -> float:
        """Return how many times the steps this family needed for the same loss; 1 before its first trial."""
        name = self.model.family(choice)
        known = [
            t.score_s / t.step_s
            for t in self.tried if t.step_s and t.score_s and self.model.family(t.choice) == name
        ]  # fmt: skip
        return statistics.mean(known) if known else 1.0

    def _spread(self) -> float:
        """Return the spread of the corrected model's errors."""
        done = [(t.choice, t.step_s) for t in self.tried if t.step_s]
        errors = [math.log(seconds / self.model.predict(choice).step_s) for choice, seconds in done]
        return math.sqrt(statistics.mean(error**2 for error in errors)) if errors else 0.0


def simplest(ranked: Sequence[tuple[float, float, Choice]]) -> tuple[float, float, Choice]:
    """Return the entry that changes least among those as promising as the first; on a tie, the first."""
    alike = [entry for entry in ranked if entry[0] <= ranked[0][0] * (1 + ALIKE)]
    return min(alike, key=lambda entry: len(entry[2].callbacks) + len(entry[2].settings))


def ran_out(error: str) -> bool:
    return any(words in error for words in OUT_OF_MEMORY)
