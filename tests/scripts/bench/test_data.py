"""Each loader gives every sample of the shards, and its table has what the goals are about."""

import itertools
import multiprocessing
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import pytest
from support.cli import environment

from scripts.bench import data as bench
from scripts.bench.harness import Rounds
from trainer.errors import ConfigError


@pytest.fixture(autouse=True)
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LARGE", 1000)


@pytest.mark.parametrize("kind", ["large", "small"])
def test_every_loader_gives_an_epoch(kind: str, tmp_path: Path) -> None:
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


def test_a_turn_is_a_process_of_its_own(tmp_path: Path) -> None:
    data = bench.Data("small", tmp_path, 96, 8)
    data.write()
    for name in ("raw", "Echelon", "webdataset"):
        for cold in (True, False):
            assert bench.turn(data, 1, cold, name)["rate"] > 0


def test_cpu_time_is_that_of_the_workers_too() -> None:
    burn = multiprocessing.get_context("fork").Process(target=lambda: deque(itertools.count(), 0), daemon=True)
    before = bench.cpu_s()
    burn.start()
    try:
        while bench.cpu_s() < before + 0.1:
            time.sleep(0.01)
    finally:
        burn.kill()
        burn.join()


def test_what_a_table_says(tmp_path: Path) -> None:
    """Rounds are compared with each other: the second is twice as slow for all."""
    turns = {"raw": [100.0, 50.0, 100.0], "Echelon": [80.0, 40.0, 80.0], "webdataset": [20.0, 10.0, 90.0]}
    found = Rounds({name: [{"rate": each, "cpu_us": 1e4 / each} for each in rates] for name, rates in turns.items()})
    rows, goals = bench.table(bench.Data("large", tmp_path, 1, 1), 2, True, found)
    assert [row["of raw reading"] for row in rows] == [1, 0.8, 0.2]
    assert [row["CPU us a sample"] for row in rows] == [100, 125, 500]
    assert [(goal.value, goal.met) for goal in goals] == [(4, True)]


def test_a_resume_in_an_index_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MILLIONS", 10_000)
    data = bench.many(tmp_path)
    assert sum(bench.loader(data, 0).source.counts) == 10_000
    assert bench.resume_s(data, 10_000 - data.batch) > 0


def test_an_unknown_loader_is_told_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["data", "--loaders", "webdatset"])
    with pytest.raises(
        ConfigError, match=r"^--loaders webdatset: no such loader is installed; did you mean webdataset"
    ):
        bench.main()


@pytest.mark.slow
def test_a_stopped_bench_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.bench.data", "--quick"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert next(line for line in lines if line.startswith("large cold 1, round 1/1: raw")), "no turn"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())
