"""scripts/bench_data.py: each loader gives every sample of the shards, and its table has what the goals are about."""

from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    import bench_data

    monkeypatch.setattr(bench_data, "LARGE", 1000)
    return bench_data


@pytest.mark.parametrize("kind", ["large", "small"])
def test_every_loader_gives_an_epoch(bench: Any, kind: str, tmp_path: Path) -> None:
    data = bench.Data(kind, tmp_path, 96, 8)
    data.write()
    assert len(data.shards) == 16
    for name in bench.LOADERS.keys() - {"streaming"}:
        seen = 0.0
        for samples in bench.LOADERS[name](data, 0):
            seen += samples
            if seen >= 96 - 1e-6:
                break
        assert seen == pytest.approx(96), name


def test_a_turn_is_a_process_of_its_own(bench: Any, tmp_path: Path) -> None:
    data = bench.Data("small", tmp_path, 96, 8)
    data.write()
    for name in ("raw", "Echelon", "webdataset"):
        for cold in (True, False):
            assert bench.turn(name, data, 1, cold) > 0


def test_what_a_table_says(bench: Any, tmp_path: Path) -> None:
    """Rounds are compared with each other: the second is twice as slow for all."""
    turns = {"raw": [100.0, 50.0, 100.0], "Echelon": [80.0, 40.0, 80.0], "webdataset": [40.0, 20.0, 90.0]}
    rows, goals = bench.table(bench.Data("large", tmp_path, 1, 1), 2, True, turns)
    assert [row["of raw reading"] for row in rows] == [1, 0.8, 0.4]
    assert [(goal.value, goal.met) for goal in goals] == [(2, True), (0.8, False)]


def test_a_resume_in_an_index_of_many(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MILLIONS", 10_000)
    data = bench.many(tmp_path)
    assert sum(bench.loader(data, 0).source.counts) == 10_000
    assert bench.resume_s(data, 10_000 - data.batch) > 0
