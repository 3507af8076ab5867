"""One search from its first trial to its verdict."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.callback import Role
from trainer.composition import kinds
from trainer.config.tuned import Tuned, cpu_name
from trainer.cost.machine import Machine
from trainer.cost.workload import Choice
from trainer.errors import ConfigError, printable
from trainer.timeouts import TRIAL_LEAST_S
from trainer.tools.cost_model.read import costs_of, read
from trainer.tools.tune.canary import Judge, Verdict, too_full
from trainer.tools.tune.candidates import NOTHING, candidates, changes_micro_batch, describe, family
from trainer.tools.tune.configs import alone, is_exact, merge, of_trial, whole
from trainer.tools.tune.correction import Model, in_words
from trainer.tools.tune.journal import Journal
from trainer.tools.tune.links import make_machine
from trainer.tools.tune.options import TuneOptions
from trainer.tools.tune.overlay import link_class
from trainer.tools.tune.search import Search, Tried, ran_out
from trainer.tools.tune.team import Team, TrialFailed
from trainer.tools.tune.time_to_loss import drift, slowdown
from trainer.tools.tune.trial import step_seconds
from trainer.tools.tune.workload import make_workload, with_phases, without_recomputation

SLOWEST = 10  # times as long as today's trial, from which on a trial counts as hung


@dataclass
class Tuning:
    """A search for a faster config of one run."""

    config: dict[str, Any]  # today's
    options: TuneOptions
    team: Team
    journal: Journal  # of an interrupted search, and of this one
    say: Callable[[str], Any]  # prints a line for the user
    cuda: bool = False  # known with the links
    batch_norm: bool = False  # known with the passes: the numbers depend on the micro-batch
    began: float = field(default_factory=time.monotonic)
    walls: list[float] = field(default_factory=list)  # seconds of trials outside their timed steps
    today: dict[str, Any] = field(default_factory=dict)
    wholes: dict[str, Choice] = field(default_factory=dict)  # by callbacks and micro-batch, asked for repeatedly
    number: int = 0
    search: Search = field(init=False)
    why: str = ""  # the search ended

    def __post_init__(self) -> None:
        self.place = self.team.place

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> tuple[Choice, Verdict | None, Tuned, list[str]]:
        """Return the best choice, its verdict if it is not today's config, the machine, and the evidence."""
        model, random, tuned, listed = self.measure()
        self.search = search = self._search(model, listed)
        best, self.why = search.run()
        self.say(f"search     {self.why}; {len(search.tried) - 1} trials, {self._misses(search.tried)}")
        if words := in_words(search.model.factors):
            self.say(f"corrected  {words}")
        if best.choice == NOTHING:
            return NOTHING, None, tuned, []
        verdict = self._canary(best.choice, random, model.machine.memory_bytes)
        return best.choice, verdict, tuned, self._evidence(best, verdict, search.tried)

    def _once(self, event: str, failed: str, run: Callable[[], Any]) -> Any:
        """Return the journal's result of this event, or else run it. `failed` begins the error's message."""
        if known := self.journal.all(event):
            return known[0]["result"]
        try:
            return self.journal.add(event, result=run())["result"]
        except TrialFailed as error:
            raise ConfigError(f"{failed}: {error}") from None

    def _run_task(self, kind: str, config: dict[str, Any], limit_s: float, **more: Any) -> list[dict[str, Any]]:
        self.number += 1
        made = of_trial(config, self.team.folder, self.number, limit_s, more.get("warm", 0) + more.get("steps", 0))
        task = {"kind": kind, "config": made, "folder": str(self.team.folder), **more}
        return self.team.run(task, limit_s)

    def length(self, choice: Choice) -> tuple[int, int]:
        """Return a trial's warm-up and timed steps, in whole periods of synchronisation."""
        period = self._period(choice)
        warm, steps = math.ceil(self.options.warm / period) * period, math.ceil(self.options.steps / period) * period
        if (most := self.config["trainer"]["max_steps"]) is not None:  # of a short run, as in an example
            steps = max(1, min(steps, most - warm))
        return warm, steps - steps % period if steps > period else steps

    def _period(self, choice: Choice) -> int:
        callbacks, allow = merge(self.config, choice)["callbacks"], tuple(self.config["trainer"]["allow_targets"])
        return max((cost.every for cost in costs_of(callbacks, allow).values() if cost), default=1)

    def run_trial(self, choice: Choice) -> dict[str, Any]:
        """Run a trial of a choice. Raises TrialFailed if it gives no result."""
        (warm, steps), period = self.length(choice), self._period(choice)
        refuse_part(steps, period)
        began, limit_s = time.monotonic(), self.options.limit_s
        if self.today and not any(kinds()[name].role == Role.COMPILE for name in choice.callbacks):
            limit_s = min(limit_s, max(TRIAL_LEAST_S, SLOWEST * self.today["wall_s"]))
        answers = self._run_task("trial", merge(self.config, choice), limit_s, warm=warm, steps=steps)
        refuse_part(len(answers[0]["times"]), period)  # the end of a run that is resumed is nearer
        step_s, wall_s = max(step_seconds(answer["times"], period) for answer in answers), time.monotonic() - began
        self.walls.append(max(0.0, wall_s - (warm - self.options.warm + len(answers[0]["times"])) * step_s))
        first = {key: answers[0][key] for key in ("losses", "precision", "advice", "phases", "spread_s")}
        memory_bytes = max(answer["memory_bytes"] for answer in answers)
        return {"step_s": step_s, "wall_s": wall_s, "memory_bytes": memory_bytes, **first}

    def measure(self) -> tuple[Model, bool, Tuned, list[Choice]]:
        """Return the model, whether losses draw random numbers, the machine, and the choices."""
        self.today = self._once("today", "today's config does not run", lambda: self.run_trial(NOTHING))
        self.say(f"today      {self.today['step_s']:.4g} s a step, memory {gib(self.today['memory_bytes'])}")
        limit_s, warm = self.options.limit_s, self.options.warm
        steps = profile_steps(self.options, self.today["step_s"])

        def links() -> list[dict[str, Any]]:
            return self._run_task("links", self.config, limit_s, lossy=self.options.lossy)

        seen = self._once("links", "the links between ranks can't be measured", links)
        self.cuda, machine = seen[0]["gpu"] is not None, make_machine(seen, self.place)

        def work() -> list[dict[str, Any]]:
            try:
                return self._run_task("profile", alone(self.config, self.place.world), limit_s, warm=warm, steps=steps)
            except TrialFailed as error:
                if not (ran_out(str(error)) and self.today["phases"]):
                    raise
                why = "since a rank alone can't run the whole model"
                self.say(f"passes     those of today's short run, {why}: {error}")
                return [self._outlined(each, machine) for each in self._run_task("outline", self.config, limit_s)]

        answers = self._once("profile", "the passes of a rank alone, with the whole model, can't be measured", work)
        for text in dict.fromkeys(text for answer in answers for text in answer.get("failed", ())):
            self.say(f"passes     without one that fails: {text}")
        workload = make_workload(answers)
        workload = without_recomputation(read(machine, workload, self._whole(NOTHING), self.config["batch"]))
        network = link_class(machine.across, self.place.world)
        tuned = Tuned(cpu_name(), seen[0]["gpu"], self.place.world, self.place.local_world, network)
        self.say(
            f"measured   {workload.forward_s * 1e3:.3g} + {workload.backward_s * 1e3:.3g} ms a sample, "
            f"{len(workload.parameters)} parameters of {sum(workload.parameters) / 1e6:.3g} M elements, "
            f"{machine.cores_per_rank:.2g} cores a rank, link {machine.across.bytes_per_s * 8 / 1e9:.3g} Gbit/s, "
            f"{machine.across.latency_s * 1e6:.3g} us"
        )
        model = Model(machine, workload, self.config["batch"], self.today["step_s"], self._whole, family)
        random, listed = any(answer["random"] for answer in answers), self._list(answers, seen[0]["backend"])
        return model, random, tuned, listed

    def _list(self, answers: list[dict[str, Any]], backend: str) -> list[Choice]:
        """Return the choices for the model that ranks have measured."""
        lossy, blocks = self.options.lossy, min(answer["blocks"] for answer in answers)
        self.batch_norm = any(answer["batch_norm"] for answer in answers)
        if self.batch_norm and self._is_exact(NOTHING) and not lossy:
            why = "since it changes BatchNorm's numbers"
            self.say(f"choices    no other micro-batch, {why}; tune.lossy=true tries some")
        return candidates(self.config, self.place, lossy, self.options.without, blocks, backend, self.batch_norm)

    def _outlined(self, found: dict[str, Any], machine: Machine) -> dict[str, Any]:
        """Return the workload of a rank as far as today's short run measures it."""
        setup = read(machine, make_workload([found]), self._whole(NOTHING), self.config["batch"])
        return with_phases(found, self.today["phases"], setup)

    def _whole(self, choice: Choice) -> Choice:
        """Return everything that the cost model reads of today's config with a choice."""
        cut = {key: value for key, value in choice.settings.items() if key in ("micro_batch", "accumulate")}
        others = {key: value for key, value in choice.settings.items() if key not in cut}
        key = repr((choice.callbacks, cut))
        if key not in self.wholes:
            self.wholes[key] = whole(merge(self.config, Choice(choice.callbacks, cut)), self.place.world, self.cuda)
        known = self.wholes[key]
        return replace(known, settings={**known.settings, **others})

    def _search(self, model: Model, listed: list[Choice]) -> Search:
        lines = [line["trial"] for line in self.journal.all("trial")]
        known = [Tried(**{**line, "choice": Choice(**line["choice"])}) for line in lines]
        known = [replace(t, score_s=math.inf) if t.step_s and t.score_s is None else t for t in known]
        first = Tried(NOTHING, model.predict(NOTHING).step_s, self.today["step_s"], self.today["step_s"])
        self.say(f"choices    {len(listed)} that a run accepts; today's predicted {outcome(first)}")
        if known:
            self.say(f"journal    resumes after {len(known)} trials: {self.journal.path}")

        def measure(choice: Choice) -> tuple[float, float]:
            result, most = self.run_trial(choice), model.machine.memory_bytes
            if why := too_full(self.today["memory_bytes"], result["memory_bytes"], most):
                raise TrialFailed(why)
            return result["step_s"], result["step_s"] * self._slowdown(choice, result["losses"])

        return Search(
            model, listed, measure, lambda: self.options.budget_s - self.elapsed_s - self.canary_s, self._note,
            lambda: self.cost_s, self._steps, [first, *known],
        )  # fmt: skip

    @property
    def canary_s(self) -> float:
        """The seconds that the canary would take with the best choice so far."""
        trials = ((NOTHING, self.today["step_s"]), (self.search.best.choice, self.search.best.step_s or 0.0))
        return self.options.pairs * sum(self.cost_s + self._steps(choice) * step_s for choice, step_s in trials)

    def _steps(self, choice: Choice) -> int:
        """Return a trial's steps beyond the usual warm-up, whose seconds are in `cost_s`."""
        warm, steps = self.length(choice)
        return warm - self.options.warm + steps

    @property
    def cost_s(self) -> float:
        """The seconds of a trial outside its timed steps, including the usual warm-up."""
        if self.walls:
            return statistics.median(self.walls)
        return max(0.0, self.today["wall_s"] - self._steps(NOTHING) * self.today["step_s"])  # of the journal

    def _slowdown(self, choice: Choice, losses: list[float | None]) -> float:
        """Return how many times the steps the choice needs for the same loss; infinity beyond `tune.bound`."""
        if self._is_exact(choice):
            return 1.0
        steps = min(len(losses), len(self.today["losses"]))
        own, other = self.today["losses"][:steps], losses[:steps]
        return slowdown(own, other) if drift(own, other) <= self.options.bound else math.inf

    def _is_exact(self, choice: Choice) -> bool:
        """Return whether the choice preserves the numbers, up to rounding."""
        other_batch = self.batch_norm and changes_micro_batch(self.config, choice, self.place.world)
        return not other_batch and is_exact(merge(self.config, choice))

    def _note(self, tried: Tried, model: Model) -> None:
        line = dataclasses.asdict(tried)
        line["score_s"] = tried.score_s if tried.score_s != math.inf else None
        self.journal.add("trial", trial=line)
        self.say(
            f"trial {len(self.journal.all('trial')):<4} {describe(tried.choice)}: {outcome(tried)}"
            f"  [{self.elapsed_s:.0f} of {self.options.budget_s:g} s]"
        )

    def _misses(self, tried: list[Tried]) -> str:
        misses = [abs(each.miss) for each in tried if each.step_s]
        return f"median error of the predictions {statistics.median(misses):.1%}"

    def _canary(self, choice: Choice, random: bool, memory_bytes: float | None) -> Verdict:
        name = describe(choice)
        pairs = [(line["before"], line["after"]) for line in self.journal.all("pair") if line["choice"] == name]
        split = any(kinds()[each].role == Role.SPLIT for each in choice.callbacks)
        random = random and (split or "micro_batch" in choice.settings)  # dropout, say, draws other numbers
        exact = self._is_exact(choice)
        judge = Judge(exact, random, self.options.bound, self.today["precision"], memory_bytes)
        try:
            while len(pairs) < self.options.pairs:
                before, after = (self.run_trial(each) for each in (NOTHING, choice))
                before["score_s"] = before["step_s"]
                after["score_s"] = after["step_s"] * self._slowdown(choice, after["losses"])
                pairs.append((before, after))
                self.journal.add("pair", choice=name, before=before, after=after)
                self.say(
                    f"canary {len(pairs)}/{self.options.pairs} today {before['step_s']:.4g} s, "
                    f"winner {after['step_s']:.4g} s  [{self.elapsed_s:.0f} of {self.options.budget_s:g} s]"
                )
        except TrialFailed as error:
            return Verdict(False, 0.0, [], [f"a run of the canary failed: {error}"])
        return judge.judge(pairs)

    def _evidence(self, best: Tried, verdict: Verdict, tried: list[Tried]) -> list[str]:
        ranks = f"{self.place.world} rank(s), {self.place.local_world} a node"
        return [
            f"{time.strftime('%Y-%m-%d')}, {ranks}, {cpu_name()}: {describe(best.choice)}",
            *verdict.findings,
            f"{len(tried) - 1} trials, {self._misses(tried)}",
        ]


def profile_steps(options: TuneOptions, step_s: float) -> int:
    """Return the steps of a profile: at most half of `limit_s`, since the other half is for the passes."""
    return max(5, min(int(options.limit_s / 2 / step_s), max(10, options.steps // 2)))


def refuse_part(steps: int, period: int) -> None:
    """Refuse to time a part of a period, which has no synchronisation."""
    if steps < period:
        raise TrialFailed(
            f"the run leaves {steps} step(s) to time, and ranks synchronise every {period}; give a smaller "
            "tune.warm, or a longer run"
        )


def outcome(tried: Tried) -> str:
    if tried.step_s is None:
        return f"failed: {printable(tried.error)}"
    lossy = ", and its loss is too large: tune.bound" if tried.score_s == math.inf else ""
    return f"{tried.predicted_s:.4g} s predicted, {tried.step_s:.4g} s measured ({tried.miss:+.1%}){lossy}"


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
