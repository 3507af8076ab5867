"""Peers by turns, those that fail or are not installed, the page, and a real run of two peers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import environment

from scripts.bench.harness import Failed
from scripts.bench.peers import __main__ as bench
from scripts.bench.peers.__main__ import CELLS, HERE, PEERS, Cell, Peer, measure

NUMBERS = {"step_s": 1.0, "first_s": 3.0, "stall_ms": 7.0, "peak_mib": 9.0}
CELL = Cell("MLP", 1, 2, 6, 8, resumes=True)


def test_a_peer_that_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def run(cell: Cell, peer: Peer) -> dict[str, float]:
        asked.append(peer.script)
        if peer.script == "lightning" and asked.count("lightning") == 2:
            raise Failed("ended with code 1: no")
        return NUMBERS

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(bench, "missing", lambda packages: "needs deepspeed" * ("deepspeed" in packages))
    rows = measure(CELL, ["bare loop", "Echelon", "Lightning", "DeepSpeed", "Composer"], 3)
    assert asked == ["bare", "echelon", "lightning", "lightning", "echelon", "bare", "bare", "echelon"]
    told = {row["peer"]: row["ms a step"] for row in rows}
    assert told == {
        "bare loop": 1000.0, "Echelon": 1000.0, "Lightning": "failed: ended with code 1: no",
        "DeepSpeed": "not installed: needs deepspeed",
        "Composer": "not installed: mosaicml 0.32.1 wants torch below 2.7.1, and imports torchvision",
    }  # fmt: skip


def test_each_peer_has_a_script_or_a_reason() -> None:
    scripts = {path.stem.removeprefix("train_") for path in HERE.glob("train_*.py")}
    assert scripts == {peer.script for peer in PEERS.values() if not peer.never}
    assert all(cell.warm + 1 < cell.save_at < cell.steps for cell in CELLS)


def test_a_run_that_fails_says_so() -> None:
    with pytest.raises(Failed, match=r"^ended with code 1: .*No module named scripts\.bench\.peers\.train_nobody"):
        bench.run(CELL, Peer("nobody"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_bare_loop_and_echelon(tmp_path: Path) -> None:
    program = f"""if True:
        import sys
        from scripts.bench.peers import __main__ as bench
        bench.CELLS = [bench.{CELL!r}]
        sys.exit(bench.main())
    """
    command = [sys.executable, "-c", program, "--peers", "Echelon", "--rounds", "1"]
    command += ["--json", str(tmp_path / "out.json"), "--out", str(tmp_path / "peers.md")]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = {row["peer"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert rows.keys() == {"bare loop", "Echelon"} and rows["bare loop"]["speed, of the bare loop"] == 1.0
    for found in rows.values():
        assert found["first step, s"] > 0.5 and found["resume, s"] > 0.5 and found["peak, MiB"] > 100
        assert 10 < found["lines"] < 60
    assert "| Echelon " in (tmp_path / "peers.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"out.json", "peers.md"}
