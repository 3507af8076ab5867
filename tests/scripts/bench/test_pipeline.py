"""Schedules over slow links: a run of each, tiny, and the rows of given times."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.ranks import run_ranks

from scripts.bench import pipeline as bench
from scripts.bench.harness import Rounds
from scripts.bench.hosts import Timed, fit
from scripts.bench.squares import quiet
from trainer.callbacks.pipeline import PipelineParallel
from trainer.process.environment import Place


def tiny(place: Place) -> list[int]:
    """Train two steps with each schedule, and return how many there were."""
    bench.FORWARD_S = bench.BACKWARD_S = 0.0
    taken = []
    for name, knobs in bench.SCHEDULES.items():
        clock = iter(range(3))
        pipeline = PipelineParallel(bench.STAGES, cut=[1, 2, 3], **knobs)
        own = replace(place, store=f"{place.store}-{name.replace(' ', '')}")
        callbacks = {"pipeline": pipeline, "timed": Timed(clock)}
        recipe, micros = bench.Recipe(), bench.MICROS
        fit(quiet(recipe, callbacks, own, f"{own.store}-run", micros, accumulate=micros, clip_norm=1.0))
        taken.append(3 - len(list(clock)))
    return taken


@pytest.mark.slow
def test_a_run_of_each_schedule(tmp_path: Path) -> None:
    assert run_ranks(bench.STAGES, tiny) == [[3, 3, 3]] * bench.STAGES


def test_what_a_row_says() -> None:
    def rounds(**seconds: list[float]) -> Rounds:
        names = zip(bench.SCHEDULES, seconds.values(), strict=True)
        return Rounds({name: [{"seconds": each} for each in times] for name, times in names})

    later = "2bw, run_ahead=2"
    made, goals = bench.row("10 ms", rounds(a=[1.96, 2.96], b=[1.16, 1.96], c=[0.96, 1.96]))
    assert (made["2bw, waiting"], made[f"{later}, waiting"]) == pytest.approx((0.35, 0.25))
    assert made["1f1b, ms a step"] == pytest.approx(2460.0) and [goal.met for goal in goals] == [True, True]
    _, goals = bench.row("20 ms", rounds(a=[1.96], b=[1.46], c=[1.06]))
    assert [goal.met for goal in goals] == [False, True]
