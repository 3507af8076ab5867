"""The search on a machine that is a formula: it finds the best choice, corrects a wrong link, outlives failures."""

from dataclasses import replace

import pytest

from trainer.cost.machine import Link, Machine
from trainer.cost.workload import Choice, Workload
from trainer.tools.cost_model.predict import predict
from trainer.tools.tune.candidates import NOTHING, family
from trainer.tools.tune.correction import Model
from trainer.tools.tune.search import Search, Tried
from trainer.tools.tune.team import TrialFailed

FAST, SLOW = Link(50e-6, 1.25e8, 1e-10), Link(50e-6, 1.25e7, 1e-10)
MACHINE = Machine(2, 1, 1.0, FAST, FAST, {}, None, 1e9)
WORK = Workload((250_000,) * 40, 0.01, 0.02, 0.005, 0.02, 0.001, 1e-5, 1e6, 1.6e8)
TODAY = {"micro_batch": 10, "data.workers": 0}


def whole(choice: Choice) -> Choice:
    return Choice(choice.callbacks, {**TODAY, **choice.settings})


CHOICES = [
    Choice(callbacks, settings)
    for callbacks in ({}, {"overlap": {}}, {"shard": {"stage": 1}})
    for settings in ({}, {"trainer.ddp.bucket_mib": 1.0}, {"micro_batch": 5}, {"micro_batch": 2})
][1:]


class Lab:
    """Measures by the formula of the true machine."""

    def __init__(self, machine: Machine, fails: str = "", left_s: float = 1e9) -> None:
        self.machine, self.fails, self.left_s, self.trials = machine, fails, left_s, list[Choice]()

    def true_s(self, choice: Choice) -> float:
        return predict(self.machine, WORK, whole(choice), 20).step_s

    def measure(self, choice: Choice) -> tuple[float, float]:
        self.trials.append(choice)
        if self.fails in choice.callbacks:
            raise TrialFailed("out of memory")
        return self.true_s(choice), self.true_s(choice)

    def search(self, believed: Machine = MACHINE) -> Search:
        today_s = self.true_s(NOTHING)
        model = Model(believed, WORK, 20, today_s, whole, family)
        first = Tried(NOTHING, model.predict(NOTHING).step_s, today_s, today_s)
        return Search(
            model, CHOICES, self.measure, lambda: self.left_s, lambda *_: None, lambda: 1.0, lambda _: 10, [first]
        )  # fmt: skip


def test_the_best_of_all_is_found_in_few_trials() -> None:
    lab = Lab(MACHINE)
    best, why = lab.search().run()
    least = min(map(lab.true_s, CHOICES))
    assert best.step_s == pytest.approx(least, rel=0.02) and len(lab.trials) <= 2
    assert why == "no other choice is predicted to be faster"


def test_of_choices_that_promise_the_same_the_simplest_is_tried() -> None:
    """Measured on two hosts of 10M: of equal predictions, the one with another bucket and worker took 6 % longer."""
    lab, bucket = Lab(MACHINE), {"trainer.ddp.bucket_mib": 1.0}
    search, simple, other = lab.search(), Choice({}, bucket), Choice({}, {**bucket, "data.workers": 1})
    search.choices = [other, simple]
    assert lab.true_s(other) < lab.true_s(simple) < 1.001 * lab.true_s(other)
    search.run()
    assert lab.trials == [simple]


def test_the_best_promise_tells_whether_a_trial_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lab, simple = Lab(MACHINE), Choice({}, {"data.workers": 1})
    search, other, today_s = lab.search(), Choice({"overlap": {}}, {"data.workers": 1}), lab.true_s(NOTHING)
    ranked = [(0.979 * today_s, 1.0, other), (0.985 * today_s, 1.0, simple)]
    monkeypatch.setattr(search, "_ranked", lambda: [] if lab.trials else ranked)
    search.run()
    assert lab.trials == [simple]


def test_a_link_that_was_slowed_behind_its_back_is_noticed() -> None:
    lab = Lab(replace(MACHINE, across=SLOW, inside=SLOW))
    search = lab.search()
    best, _ = search.run()
    assert best.step_s == pytest.approx(min(map(lab.true_s, CHOICES)), rel=0.02)
    assert abs(search.tried[0].miss) > 0.5 and search.model.factors["across"] > 1
    left = [abs(search.model.predict(t.choice).step_s / t.step_s - 1) for t in search.tried if t.step_s]
    assert max(left) < 0.1


def test_choices_that_fail_are_left_out_and_the_search_goes_on() -> None:
    lab = Lab(MACHINE, fails="overlap")
    search = lab.search()
    best, _ = search.run()
    assert sum("overlap" in choice.callbacks for choice in lab.trials) <= 2
    assert [t.error for t in search.tried if t.error] == ["out of memory"] * sum(
        map(bool, [t.error for t in search.tried])
    )
    assert "overlap" not in best.choice.callbacks and best.step_s is not None


def test_a_setting_that_fails_twice_is_tried_no_third_time() -> None:
    class Broken(Lab):
        def measure(self, choice: Choice) -> tuple[float, float]:
            if choice.settings.get("trainer.ddp.bucket_mib") == 1.0:
                self.trials.append(choice)
                raise TrialFailed("no end within 8 s")
            return super().measure(choice)

    lab = Broken(MACHINE)
    search = lab.search()
    bucket = {"trainer.ddp.bucket_mib": 1.0}
    search.choices = [Choice({}, {**bucket, "micro_batch": micro}) for micro in (10, 5, 4, 2, 1)]
    for choice in search.choices[:2]:
        search.try_out(choice)
    assert not search._ranked() and len(lab.trials) == 2


def test_the_budget_ends_the_search() -> None:
    lab = Lab(MACHINE, left_s=2.0)
    best, why = lab.search().run()
    assert (best.choice, why, lab.trials) == (NOTHING, "the budget is over", [])


def test_what_takes_no_more_memory_than_today_s_config_fits_whatever_the_model_says() -> None:
    lab = Lab(MACHINE)
    best, _ = lab.search(replace(MACHINE, memory_bytes=1.0)).run()
    assert best.step_s == pytest.approx(min(map(lab.true_s, CHOICES)), rel=0.02)


FULL = {"activation_checkpoint": {"policy": "full"}}
SMALL = replace(WORK, pass_s=0.1)  # passes that small micro-batches do not fill


def small(choice: Choice) -> Choice:
    """Return a choice beside a config of today that has micro-batches of 2 samples."""
    return Choice(choice.callbacks, {"data.workers": 0, "micro_batch": 2, **choice.settings})


def bytes_of(choice: Choice) -> float:
    return predict(MACHINE, SMALL, small(choice), 20).memory_bytes


class Room(Lab):
    """A machine whose memory nobody has told: trials with more than it has fail."""

    def __init__(self, memory_bytes: float) -> None:
        super().__init__(MACHINE)
        self.memory_bytes = memory_bytes

    def measure(self, choice: Choice) -> tuple[float, float]:
        self.trials.append(choice)
        if bytes_of(choice) > self.memory_bytes:
            raise TrialFailed("rank 0: out of memory")
        seconds = predict(MACHINE, SMALL, small(choice), 20).step_s
        return seconds, seconds

    def search(self, believed: Machine = MACHINE) -> Search:
        today_s = predict(MACHINE, SMALL, small(NOTHING), 20).step_s
        search = super().search()
        search.model = Model(believed, SMALL, 20, today_s, small, family)
        search.choices = [Choice(callbacks, {"micro_batch": micro}) for micro in (5, 10) for callbacks in ({}, FULL)]
        search.tried = [Tried(NOTHING, today_s, today_s, today_s)]
        return search


def test_recomputing_is_tried_once_a_larger_micro_batch_runs_out_of_memory() -> None:
    plain, less = Choice({}, {"micro_batch": 10}), Choice(FULL, {"micro_batch": 10})
    lab = Room((bytes_of(plain) + max(bytes_of(less), bytes_of(Choice({}, {"micro_batch": 5})))) / 2)
    best, _ = lab.search().run()
    assert lab.trials[0] == plain and less in lab.trials and best.choice == less
    assert Choice(FULL, {"micro_batch": 5}) not in lab.trials  # it fits without


def test_recomputing_is_no_choice_where_everything_fits() -> None:
    assert not [choice for *_, choice in Room(1e18).search()._ranked() if choice.callbacks]
    limit = (bytes_of(Choice({}, {"micro_batch": 5})) + bytes_of(Choice({}, {"micro_batch": 10}))) / 2
    found = [choice for *_, choice in Room(1e18).search(replace(MACHINE, memory_bytes=limit))._ranked()]
    assert Choice({}, {"micro_batch": 10}) not in found
    assert [choice.settings["micro_batch"] for choice in found if choice.callbacks] == [10]


def test_a_setting_that_the_model_leaves_out_is_tried_once_for_hope() -> None:
    lab = Lab(replace(MACHINE, across=SLOW, inside=SLOW))
    search = lab.search(lab.machine)
    nccl = [Choice({}, {"nccl.max_channels": 8}), Choice({"overlap": {}}, {"nccl.max_channels": 8})]
    search.choices = [Choice({"overlap": {}}, {}), *nccl]
    search.run()
    assert sum("nccl.max_channels" in choice.settings for choice in lab.trials) == 1
