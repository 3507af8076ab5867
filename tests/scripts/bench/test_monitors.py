"""The bench runs each pair on real ranks, and writes its page."""

from pathlib import Path

import pytest

from scripts.bench import monitors
from scripts.bench.harness import Rounds
from scripts.bench.overhead.turns import MLP
from trainer.process.environment import Place


def test_a_run_s_number_is_the_median_of_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 1.5, 9.0, 9.6])  # the second block met a neighbour
    monkeypatch.setattr(monitors, "STEPS", {1: 150})
    monkeypatch.setattr(monitors.time, "process_time", lambda: next(times))
    name, (_, observed, _) = "step_timer", monitors.PAIRS["step_timer"]
    monkeypatch.setattr(monitors, "RUNS", iter([name]))
    assert monitors.run(Place(), MLP, observed()) == pytest.approx(0.6 / 50 * 1e6)
    assert (tmp_path / name / "run" / "step_times.jsonl").exists()


@pytest.mark.slow
def test_all_pairs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: one that is spawned would take the real numbers of steps."""
    for name, value in (("STEPS", {1: 4}), ("BLOCK", 2), ("WARM", 2)):
        monkeypatch.setattr(monitors, name, value)
    monkeypatch.setattr(monitors, "on_ranks", lambda world, function, rounds: [function(Place(), rounds)])
    table = monitors.measure(1, 2)
    assert [row["monitor"] for row in table] == ["nothing", "step_timer", "events", "profiler", "gpu_monitor"]
    assert all(row["least"] <= row["extra CPU us"] <= row["most"] for row in table)


def test_the_number_of_a_pair_is_the_median_of_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [[(10.0, 11.0), (20.0, 29.0), (30.0, 33.0)], [(12.0, 13.0), (22.0, 31.0), (32.0, 35.0)]]
    ranks = [Rounds({"events": [{"without": a, "with": b} for a, b in each]}) for each in pairs]
    monkeypatch.setattr(monitors, "on_ranks", lambda *_: ranks)
    (row,) = monitors.measure(2, 3)
    assert (row["CPU us a step without"], row["extra CPU us"], row["least"], row["most"]) == (21.0, 3.0, 1.0, 9.0)


def test_each_monitor_has_a_goal() -> None:
    rows = [{"part": "1 rank(s); 2 rounds", "monitor": name, "extra CPU us": 51.0} for name in ("nothing", "events")]
    assert [(goal.name, goal.met) for goal in monitors.goals([rows])] == [
        ("events, 1 rank(s), CPU us of a step", False)
    ]
