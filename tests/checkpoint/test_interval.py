"""The interval of checkpoint.every=auto: the papers' numbers, a simulation, and what a run measures."""

import json
import math
import random
from pathlib import Path

import pytest

from trainer.checkpoint.interval import DEVICE_HOURS, FIRST, Interval, daly, lost, noted, prior_s, young

MINUTE, HOUR = 60.0, 3600.0


def test_young_on_64_machines_of_a_year_each() -> None:
    """Low et al. 2012, "Distributed GraphLab", arXiv:1204.6078: a checkpoint takes 2 minutes, 3 hours are best."""
    assert young(2 * MINUTE, 365 * 24 * HOUR / 64) == pytest.approx(3 * HOUR, rel=0.01)


@pytest.mark.parametrize(("mtbf_s", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_daly_s_figures_3_to_5(mtbf_s: float, minutes: float) -> None:
    """Checkpoints take 5 minutes."""
    assert daly(5 * MINUTE, mtbf_s) == pytest.approx(minutes * MINUTE, abs=30 if minutes > 10 else 3)  # as printed


def test_a_stall_beyond_the_failures() -> None:
    assert daly(100.0, 50.0) == 50.0 and daly(100.0, 49.0) == 49.0


@pytest.mark.parametrize("mtbf_s", [15 * MINUTE, 6 * HOUR, 24 * HOUR])
def test_daly_s_interval_loses_least(mtbf_s: float) -> None:
    best, restart_s = daly(5 * MINUTE, mtbf_s), 10 * MINUTE
    least = min(lost(factor * best, 5 * MINUTE, restart_s, mtbf_s) for factor in (0.25, 0.5, 0.9, 1.1, 2, 4))
    assert lost(best, 5 * MINUTE, restart_s, mtbf_s) < least


def test_the_share_that_is_lost_is_a_simulation_s() -> None:
    """Failures come as a Poisson process, also during a restart; the work since the last checkpoint is repeated."""
    interval, stall, restart, mtbf, rng = 40.0, 5.0, 10.0, 200.0, random.Random(0)
    now, kept = 0.0, 0.0
    for _ in range(20_000):
        left = rng.expovariate(1 / mtbf)
        while left < interval + stall:
            now += left
            left = rng.expovariate(1 / mtbf)
            while left < restart:
                now += left
                left = rng.expovariate(1 / mtbf)
            now += restart
            left = rng.expovariate(1 / mtbf)
        now, kept = now + interval + stall, kept + interval
    assert lost(interval, stall, restart, mtbf) == pytest.approx(1 - kept / now, abs=0.01)


def test_nothing_is_left_where_failures_come_before_any_checkpoint() -> None:
    assert lost(1e6, 1.0, 1.0, 1.0) == 1.0


def test_the_prior_is_that_of_a_large_run_and_a_week_of_a_small_one() -> None:
    assert pytest.approx(50_676, rel=1e-3) == DEVICE_HOURS
    assert prior_s(16_384) == pytest.approx(54 * 24 * HOUR / 419, rel=0.02)
    assert prior_s(1) == pytest.approx(7 * 24 * HOUR, rel=0.005)
    assert prior_s(4096) < prior_s(8) < prior_s(1)


def test_a_run_without_failures_takes_the_prior(tmp_path: Path) -> None:
    made = Interval(True, 8, tmp_path)
    assert made.seconds == FIRST
    made.measure(2.0, 30.0, trained_s=600.0)
    assert made.seconds == pytest.approx(daly(2.0, prior_s(8)))


def test_failures_of_the_run_shorten_it(tmp_path: Path) -> None:
    made = Interval(True, 8, tmp_path)
    (tmp_path / "events.jsonl").write_text('{"failed": "killed", "of_machines": true}\n' * 2)
    made.measure(2.0, 30.0, trained_s=7200.0)
    assert made.failures == 2 and made.seconds == pytest.approx(daly(2.0, 3600.0))
    made.measure(2.0, 30.0, trained_s=72_000.0)  # ten times as long without another one
    assert made.seconds == pytest.approx(daly(2.0, 36_000.0))


def test_what_a_restart_would_meet_is_no_failure_of_a_machine(tmp_path: Path) -> None:
    """Neither are lines that are cut or another program's."""
    ends = [json.dumps({"failed": "echelon: lr=x: is no number", "code": 78, "of_machines": False})]
    odd = ['{"failed": "cut off', "[]", '{"code": 0}', json.dumps({"failed": "killed", "of_machines": True})]
    (tmp_path / "events.jsonl").write_text("\n".join(ends + odd))
    assert noted(tmp_path) == 1


def test_a_checkpoint_is_written_before_the_next_begins(tmp_path: Path) -> None:
    made = Interval(True, 8, tmp_path)
    made.measure(0.001, 900.0, trained_s=10.0)
    assert made.seconds == 900.0


def test_measurements_are_smoothed(tmp_path: Path) -> None:
    made = Interval(True, 1, tmp_path)
    for stall in (1.0, 3.0):
        made.measure(stall, 0.0, 1.0)
    assert made.stall_s == 2.0 and made.write_s == 0.0


def test_it_is_said_once_and_again_if_it_changes_much(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "echelon")
    made = Interval(True, 1, tmp_path)
    for stall in (1.0, 1.1, 1.2, 100.0):
        made.measure(stall, 0.0, 1.0)
    lines = [record.getMessage() for record in caplog.records if "checkpoint.every=auto" in record.getMessage()]
    assert len(lines) == 2 and "stops training for 1 s" in lines[0] and "none seen, a prior" in lines[0]


def test_state_comes_back(tmp_path: Path) -> None:
    made = Interval(True, 1, tmp_path)
    made.restart_s = 12.0
    made.measure(1.5, 3.0, 100.0)
    again = Interval(True, 1, tmp_path)
    again.load_state_dict(json.loads(json.dumps(made.state_dict())))
    again.decide(100.0)
    assert again.state_dict() == made.state_dict() and again.seconds == made.seconds
    plain = Interval(False, 1, tmp_path)
    plain.decide(100.0)
    assert plain.state_dict() == {} and plain.seconds == FIRST


@pytest.mark.parametrize("odd", [math.nan, math.inf, -1.0, "1", True, None])
def test_odd_state_is_refused(tmp_path: Path, odd: object) -> None:
    state = {"stall_s": 1.0, "write_s": 1.0, "restart_s": odd, "failures": 0}
    with pytest.raises((ValueError, TypeError)):
        Interval(True, 1, tmp_path).load_state_dict(state)


def test_torchrun_s_restarts_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert noted(tmp_path) == 3
