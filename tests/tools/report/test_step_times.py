"""Seconds of each rank: means over steps by hand, also where ranks come and go."""

import numpy as np
import pytest
from support.run_files import write_lines

from trainer.tools.report.step_times import PARTS, RankTimes, read_step_times


def rank(**seconds: float) -> dict[str, float]:
    return {"step": sum(seconds.values()), **dict.fromkeys(PARTS, 0.0), **seconds}


def test_means_over_steps(tmp_path):
    """10 steps of 1 s and 30 of 2 s: 1.75 s."""
    file = tmp_path / "step_times.jsonl"
    write_lines(file, [
        {"step": 10, "steps": 10, "ranks": [rank(forward=1.0), rank(forward=0.5, communication=0.5)]},
        {"step": 40, "steps": 30, "ranks": [rank(forward=2.0), rank(forward=1.0, communication=1.0)]},
    ])  # fmt: skip
    times, note = read_step_times(file, 128)
    assert note == "" and times.ranks == 2 and times.last.tolist() == [10, 40]
    means = times.means()
    assert means[:, -1].tolist() == [1.75, 1.75]
    assert means[:, PARTS.index("forward")].tolist() == [1.75, 0.875]


def test_spans_are_merged_and_sums_stay(tmp_path):
    file = tmp_path / "step_times.jsonl"
    lines = [{"step": n, "steps": 1, "ranks": [rank(data=n / 1000)]} for n in range(1, 1001)]
    write_lines(file, lines)
    times, _ = read_step_times(file, 16)
    assert 8 <= len(times.last) <= 16 and times.last[-1] == 1000
    assert times.means()[0, 0] == pytest.approx(0.5005)
    assert (np.diff(times.last) > 0).all()


def test_a_rank_that_joins_has_no_earlier_steps(tmp_path):
    file = tmp_path / "step_times.jsonl"
    write_lines(file, [
        {"step": 10, "steps": 10, "ranks": [rank(data=1.0)]},
        {"step": 20, "steps": 10, "ranks": [rank(data=3.0), rank(data=5.0)]},
        {"step": 30, "steps": 10, "ranks": [rank(data=5.0)]},
    ])  # fmt: skip
    times, _ = read_step_times(file, 128)
    assert times.means()[:, 0].tolist() == [3.0, 5.0]
    assert times.steps.tolist() == [[10, 0], [10, 10], [10, 0]]


def test_odd_lines_are_left_out(tmp_path):
    file = tmp_path / "step_times.jsonl"
    odd = [{"step": 1}, {"step": 2, "steps": 0, "ranks": [rank()]}, {"step": 3, "steps": 1, "ranks": [{}]}]
    odd += [{"step": 4, "steps": 1, "ranks": [rank(), {"step": 1.0}]}, {"step": 5, "steps": 1, "ranks": "x"}]
    write_lines(file, [*odd, {"step": 6, "steps": 1, "ranks": [rank(forward=2.0)]}])
    times, note = read_step_times(file, 128)
    assert times.last.tolist() == [6] and note == "step_times.jsonl: 5 line(s) are odd, and left out"


def test_many_ranks_need_bounded_memory():
    """4,096 ranks keep two spans of 128."""
    times = RankTimes(128)
    table = np.ones((200, 4096, len(PARTS) + 1))
    times.add(np.arange(200.0), np.ones((200, 4096)), table)
    times.close()
    assert len(times.last) <= 2 and times.means().max() == 1.0
