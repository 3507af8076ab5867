"""Rounds that are kept and gone on with, a way that fails, the page, and a real row."""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.cli import environment
from support.messages import refuses
from support.network import left_behind, namespaces, needs_cluster

from scripts.bench.guides import __main__ as bench
from scripts.bench.guides.__main__ import chosen, lacking, measure, page, record_of, table
from scripts.bench.guides.rows import ROWS
from scripts.bench.harness import Failed
from trainer.errors import ConfigError


class Fake:
    """Stands for the ranks: a step of overlap takes half as long as any other, and fp16 fails."""

    asked: list[tuple[str, str, bool]] = []

    def __init__(self, *_: Any) -> None:
        self.asked.clear()

    def turn(self, model: str, name: str, rate: str, steps: int, patience_s: float, learns: bool) -> dict[str, float]:
        self.asked.append((name, rate, learns))
        if name == "fp16":
            raise Failed("rank 1: ended with code -11")
        return {"seconds": 0.5 if name == "overlap" else 1.0, "sent": 1.0}


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ranks_in", lambda *_: nullcontext(Fake()))


def test_a_second_call_measures_what_is_missing(faked: None, tmp_path: Path) -> None:
    file = tmp_path / "rounds.json"
    overlap = [ROWS["overlap"]]
    measure(overlap, 2, record_of(file, "2gbit"))
    turns = [("DDP", "2gbit", False), ("overlap", "2gbit", True)]
    assert Fake.asked == [*turns, *turns[::-1]]  # the next round turns the order round
    measure([*overlap, ROWS["overlap, against none"]], 2, record_of(file, "2gbit"))
    assert {name for name, _, _ in Fake.asked} == {"one bucket", "overlap"}
    record = record_of(file, "2gbit")
    assert [ROWS[name].measured(record["rounds"]) for name in ("overlap", "overlap, against none", "compression")] == [
        "2.00 (2.00 to 2.00)", "2.00 (2.00 to 2.00)", "not measured yet",
    ]  # fmt: skip
    Fake.asked.clear()
    assert not lacking(overlap, 2, record) and lacking(overlap, 3, record) == ["DDP", "overlap"]
    with pytest.raises(ConfigError, match=r"^--json .*: is of .*2gbit.*, not of .*1gbit"):
        record_of(file, "1gbit")


def test_a_way_that_fails_costs_no_other(faked: None, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(None, "2gbit")
    measure(chosen("^(compression|overlap)$"), 2, record)
    assert [name for name, _, _ in Fake.asked] == ["DDP", "fp16", "overlap", "overlap", "DDP"]
    assert ROWS["overlap"].measured(record["rounds"]) == "2.00 (2.00 to 2.00)"
    assert ROWS["compression"].measured(record["rounds"]) == "not measured yet"
    assert "fp16: failed: rank 1: ended with code -11" in capsys.readouterr().err


def test_unequal_ranks_have_a_link_without_limit(faked: None) -> None:
    measure([ROWS["dynamic batches"]], 1, record_of(None, "2gbit"))
    assert Fake.asked == [("unequal", "unlimited", False), ("hetero_batch", "unlimited", False)]


def test_memory_needs_no_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model: recomputing all blocks keeps fewer bytes."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # as `compose` sets it
    monkeypatch.setattr(bench, "SIZES", {**bench.SIZES, "layers": 2, "hidden": 64, "sequence": 32, "batch": 2})
    monkeypatch.setattr(bench, "ranks_in", None)
    record = record_of(None, "2gbit")
    measure(chosen("activation checkpointing, full"), 1, record)
    (found,) = record["rounds"]
    assert found["full"]["kept"] < found["activations"]["kept"] < found["activations"]["whole"]
    told = ROWS["activation checkpointing, full"].measured(record["rounds"])
    assert re.fullmatch(r"\d+ % of activations, \d+ % with weights and AdamW; a pass takes .* times as long", told)


def test_the_page_has_every_row_and_the_limit(faked: None) -> None:
    record = record_of(None, "2gbit")
    record["machines"].append({"cpu": "a CPU", "cores": 2})
    measure(chosen("communication, before"), 1, record)
    cells = {row["row"]: row for row in table(record)}
    assert cells.keys() == ROWS.keys() and len({tuple(row) for row in cells.values()}) == 1
    assert cells["overlap"]["config"] == "`+callbacks=[overlap]`" and cells["overlap"]["against"] == "DDP"
    written = page(record)
    assert "is 1.00 times as fast as DDP's" in written and "Machine: cpu a CPU, cores 2." in written
    assert all(re.search(rf"^\| {re.escape(name)} +\|", written, re.MULTILINE) for name in ROWS)


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    with refuses("--rows nonsense", "DataParallel", "DataParallel"):
        chosen("nonsense")


@needs_cluster
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_row(tmp_path: Path) -> None:
    before, file, out = namespaces(), tmp_path / "rounds.json", tmp_path / "guides.md"
    command = [sys.executable, "-m", "scripts.bench.guides", "--rows", "^compression$", "--rounds", "1"]
    command += ["--json", str(file), "--out", str(out)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    (round,) = json.loads(file.read_text())["rounds"]
    assert round.keys() == {"DDP", "fp16"}
    assert round["DDP"]["sent"] / round["fp16"]["sent"] == pytest.approx(2, rel=0.02)
    assert re.search(r"^\| compression .*\| \d+\.\d\d \(", out.read_text(), re.MULTILINE)
    assert not [path for path in tmp_path.iterdir() if path not in (file, out)], "left files where it was started"
    assert not left_behind(before)
