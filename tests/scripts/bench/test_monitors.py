"""The bench runs each pair on real ranks, and writes its page."""

from pathlib import Path
from typing import Any

import pytest

from scripts.bench import monitors
from scripts.bench.overhead.loops import MLP
from trainer.process.environment import Place


def test_a_run_s_number_is_the_median_of_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 1.5, 9.0, 9.6])  # the second block met a neighbour
    monkeypatch.setattr(monitors, "STEPS", {1: 150})
    monkeypatch.setattr(monitors.time, "process_time", lambda: next(times))
    name, (_, observed, _) = "step_timer", monitors.PAIRS["step_timer"]
    assert monitors.run(Place(), MLP, observed(), tmp_path / name) == pytest.approx(0.6 / 50 * 1e6)
    assert (tmp_path / name / "run" / "step_times.jsonl").exists()


@pytest.mark.slow
def test_all_pairs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: one that is spawned would take the real numbers of steps."""
    monkeypatch.setattr(monitors, "STEPS", {1: 4})
    monkeypatch.setattr(monitors, "BLOCK", 2)
    monkeypatch.setattr(monitors, "WARM", 2)
    monkeypatch.setattr(monitors, "ProcessPoolExecutor", Here)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    table = monitors.measure(1, 2)
    assert [row["monitor"] for row in table] == ["nothing", "step_timer", "events", "profiler", "gpu_monitor"]
    assert all(row["least"] <= row["extra CPU us"] <= row["most"] for row in table)


class Here:
    def __init__(self, *_: Any) -> None:
        self.map = map

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_the_number_of_a_pair_is_the_median_of_its_rounds() -> None:
    row = monitors.row("p", "events", [(10.0, 11.0), (20.0, 29.0), (30.0, 33.0)])
    assert (row["CPU us a step without"], row["extra CPU us"], row["least"], row["most"]) == (20.0, 3.0, 1.0, 9.0)
    assert monitors.mean_of(((1.0, 3.0), (5.0, 9.0))) == (3.0, 6.0)


@pytest.mark.parametrize(("extra", "said"), [(49.0, "All are met."), (51.0, "Missed: events, 1 rank(s)")])
def test_the_page_tells_of_goals(extra: float, said: str) -> None:
    tables = [[monitors.row("1 rank(s); 2 rounds", name, [(10.0, 10.0 + extra)]) for name in ("nothing", "events")]]
    found = monitors.goals(tables)
    assert [goal.name for goal in found] == ["events, 1 rank(s), CPU us of a step"]
    page = monitors.page(tables, found, {"cpu": "a CPU"})
    assert said in page and "cpu a CPU" in page and "| events  |" in page
    assert all(len(line) <= 120 or line.startswith("Machine") for line in page.splitlines())
