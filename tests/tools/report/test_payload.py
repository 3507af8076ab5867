"""Numbers of the page: exact where there is room, extremes where there is not, and each array once."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.run_files import long_metrics, synthetic_run, write_lines

from trainer.tools.report.payload import MOST_BARS, MOST_NUMBERS, details, make_payload, size
from trainer.tools.report.run import Run, read_run
from trainer.tools.report.step_times import PARTS


def made(*folders: Path, most: int = 1000) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    runs = [read_run(folder, folder.name, most) for folder in folders]
    data, charts = make_payload(runs)
    json.dumps(data, allow_nan=False)
    return data, {chart.spec["title"]: chart.spec for chart in charts}


def numbers(data: dict[str, Any], i: int) -> np.ndarray:
    array = data["arrays"][i]
    return np.frombuffer(base64.b64decode(array["text"]), f"<f{array['bytes']}")


def test_curves_have_the_values_of_the_file(tmp_path):
    folder = synthetic_run(tmp_path / "r", 100)
    data, charts = made(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for label, name in (("training", "train/loss"), ("validation", "val/loss")):
        (line,) = (line for line in charts["Loss"]["lines"] if line["label"] == label)
        expected = [(one["step"], one[name]) for one in lines if name in one]
        assert numbers(data, line["x"]).tolist() == [step for step, _ in expected]
        assert numbers(data, line["y"]) == pytest.approx([value for _, value in expected], rel=1e-6)
        assert line["last"] == expected[-1][1] and "low" not in line
    assert len({array["text"] for array in data["arrays"]}) == len(data["arrays"])


def test_a_spike_of_one_step_in_many_is_in_the_band(tmp_path):
    long_metrics(tmp_path / "r" / "metrics.jsonl", 30_000)
    data, charts = made(tmp_path / "r", most=500)
    line = charts["Training loss"]["lines"][0]
    assert 250 <= len(numbers(data, line["x"])) <= 500
    assert numbers(data, line["high"]).max() == 99.0
    assert numbers(data, line["y"]).max() < 50


@pytest.mark.slow
def test_many_metrics_share_the_room(tmp_path):
    names = [f"mine/{n}" for n in range(300)]
    write_lines(tmp_path / "r" / "metrics.jsonl", [{"step": s, **dict.fromkeys(names, s % 7)} for s in range(1, 3001)])
    data, _ = made(tmp_path / "r", most=4000)
    run = read_run(tmp_path / "r", "r", 4000)
    make_payload([run])
    kept = sum(len(metric.ranges.table) for metric in run.metrics.values())
    assert kept * 3 <= MOST_NUMBERS and len(data["charts"]) == 300


def test_parts_of_a_step_are_stacked(tmp_path):
    folders = [synthetic_run(tmp_path / name, 40, seed=n) for n, name in enumerate("ab")]
    data, charts = made(*folders)
    specs = [charts[f"A step of {name}"] for name in "ab"]
    for spec in specs:
        assert [line["label"] for line in spec["lines"]] == list(PARTS)
        assert len({line["x"] for line in spec["lines"]}) == 1
        lines = [json.loads(line) for line in (tmp_path / spec["title"][-1] / "metrics.jsonl").read_text().splitlines()]
        sums = sum(numbers(data, line["y"]) for line in spec["lines"])
        assert sums == pytest.approx([line["time/step"] for line in lines if "time/step" in line], rel=1e-5)
    assert "time/forward" not in charts and "time/step" not in charts


def test_bars_of_ranks_add_up(tmp_path):
    folder = synthetic_run(tmp_path / "r", 40, ranks=3)
    data, _ = made(folder)
    bars = data["runs"][0]["ranks"]
    assert bars["ranks"] == [0, 1, 2] and set(bars["parts"]) <= {*PARTS, "rest"}
    seconds = numbers(data, bars["seconds"]).reshape(-1, 3, len(bars["parts"])).sum((0, 2))
    steps = numbers(data, bars["steps"]).reshape(-1, 3).sum(0)
    lines = [json.loads(line) for line in (folder / "step_times.jsonl").read_text().splitlines()]
    expected = [np.mean([line["ranks"][rank]["step"] for line in lines]) for rank in range(3)]
    assert seconds / steps == pytest.approx(expected, rel=1e-5)


def test_of_many_ranks_the_slowest_have_bars(tmp_path):
    ranks = [{"step": 2.0, "forward": 1.0, "data": 1.0} for _ in range(100)]
    ranks[77] = {"step": 2.0, "forward": 2.0, "data": 0.0}
    write_lines(tmp_path / "r" / "step_times.jsonl", [{"step": 1, "steps": 1, "ranks": ranks}])
    write_lines(tmp_path / "r" / "metrics.jsonl", [{"step": 1, "train/loss": 1.0}])
    bars = made(tmp_path / "r")[0]["runs"][0]["ranks"]
    assert len(bars["ranks"]) == MOST_BARS and 77 in bars["ranks"]


def test_runs_without_numbers(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    run: Run = read_run(tmp_path, "r", 100)
    data, charts = make_payload([run])
    assert charts == [] and data["runs"][0] == {"name": "r", "axes": {}, "events": [], "ranks": None}


def test_facts_of_an_event():
    event = {"event": "checkpoint", "seconds": 1.234, "stall": 0.5, "bytes": 3 << 20}
    assert details(event) == "1.23 s, stall 0.5 s, 3 MiB"
    assert details({"event": "crash", "error": "a\x1b[2Jb"}) == "a?[2Jb"
    assert [size(n) for n in (0, 1023, 2048, 5 << 30, 5 << 50, float("nan"))] == [
        "0 B", "1023 B", "2 KiB", "5 GiB", "5120 TiB", "unknown",
    ]  # fmt: skip
