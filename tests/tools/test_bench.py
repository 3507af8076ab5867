"""The command: two ranks that it starts, one rank alone, mistakes in one line, and a shaped link's rate."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import Result, environment, run
from support.messages import refuses
from support.network import Cluster, needs_cluster

from trainer.comm.bandwidth import BUS_FACTORS
from trainer.cost.machine import from_json
from trainer.errors import ConfigError
from trainer.tools import bench
from trainer.tools.measure.parts import PARTS

BENCH = [sys.executable, "-m", "trainer.tools.bench"]
PAYLOAD = 1448 / 1514  # of a frame: the token bucket counts headers of Ethernet, IP and TCP as well


def command(folder: Path, *words: str) -> Result:
    return run(list(words), folder, "trainer.tools.bench", 120)


@pytest.mark.slow
def test_two_ranks_that_it_starts(tmp_path: Path) -> None:
    words = ("--devices", "2", "--only", "links", "--collectives", "all_reduce", "all_gather", "--max-mib", "1")
    done = command(tmp_path, *words, "--seconds", "0.01", "--json", "b.json")
    assert (done.code, done.err) == (0, "")
    found = json.loads((tmp_path / "b.json").read_text())
    assert {(row["level"], row["collective"], row["ranks"]) for row in found["collectives"]} == {
        ("inside", "all_reduce", 2), ("inside", "all_gather", 2),
    }  # fmt: skip
    for row in found["collectives"]:
        assert row["busbw"] == pytest.approx(row["bytes"] / row["seconds"] * BUS_FACTORS[row["collective"]](2))
        assert f"{row['collective']:<15}{row['bytes']:>12}" in done.out
    assert found["machine"] is None
    busy = [line for line in found["not_measured"] if line.startswith("CPU us: without interrupts")]
    assert {row["estimated"] for row in found["collectives"]} == {not busy}
    first, *slow, last = (line for line in found["not_measured"] if line not in busy)
    assert first == "across: not measured: there is one node"
    assert last == "machine: not made: the cost model needs codecs disk links, and all_reduce"
    assert all(line.endswith("not measured: a call takes longer than --seconds=0.01") for line in slow)
    assert sorted(os.listdir(tmp_path)) == ["b.json"]


def test_a_failure_of_ranks_that_it_starts_is_one_line(tmp_path: Path) -> None:
    done = command(tmp_path, "--devices", "2", "--accelerator", "cpu", "--backend", "nccl", "--only", "links")
    assert (done.code, done.out, done.err.count("\n")) == (78, "", 1)
    assert done.err.startswith("echelon: trainer.backend=nccl: needs CUDA, and this run is on cpu; use ")


def test_one_rank_says_what_it_can_not_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.tools.measure.codecs.SHAPE", (64, 64))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    options = bench.parser().parse_args(["--only", "links", "codecs", "disk", "--disk-mib", "1", "--json", "b.json"])
    assert bench.run(options) == 0
    found = json.loads(Path("b.json").read_text())
    machine = from_json(found["machine"])
    assert (machine.ranks, machine.ranks_per_node, machine.cores_per_rank) == (1, 1, len(os.sched_getaffinity(0)))
    assert machine.disk_bytes_per_s == found["disk"]["write_bytes_per_s"]
    assert "bf16" in machine.codecs and machine.memory_bytes and found["auto_precision"] == "fp32"
    assert found["not_measured"] == [
        "links: not measured: one rank sends nothing; give --devices=2, or start by torchrun"
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "link"], "--only link: is unknown; did you mean links"),
        (["--collectives", "allreduce"], "--collectives allreduce: is unknown; did you mean all_reduce"),
        (["--devices", "0"], "--devices=0: must be at least 1"),
        (["--seconds", "0"], "--seconds=0.0: must be more than 0"),
        (["--json", "none/b.json"], "--json none/b.json: none is no folder that can be written; give another place"),
        (["--png", "."], "--png=.: is a folder; name a file"),
    ],
)
def test_mistakes_are_refused_before_anything_is_measured(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bench.run(bench.parser().parse_args(words))
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "torchrun started 2"),
        (
            {
                "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
                "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a,b",
            },
            "srun started 1",
        ),
    ],
)  # fmt: skip
def test_devices_that_contradict_the_launcher_are_refused(
    env: dict[str, str], launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(env))
    with pytest.raises(ConfigError) as caught:
        bench.run(bench.parser().parse_args(["--devices", "3"]))
    why = f"--devices=3: {launcher} rank(s) on this node"
    assert str(caught.value) == f"{why}; let the launcher start as many, or leave --devices out"


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    done = command(tmp_path, "--only", "x")
    assert (done.code, done.out, done.err.count("\n")) == (78, "", 1)
    assert done.err.startswith("echelon: --only x: is unknown; there are codecs, ")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with refuses("trainer.accelerator=cuda", "CUDA", "CUDA"):
        bench.run(bench.parser().parse_args(["--accelerator", "cuda"]))


def test_without_matplotlib_a_png_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    with refuses("--png", "'matplotlib>=3.9,<4'"):
        bench.run(bench.parser().parse_args(["--png", "b.png"]))


def test_the_parts_are_those_of_the_options() -> None:
    assert tuple(PARTS) == bench.ALL


@pytest.mark.slow
@needs_cluster
@pytest.mark.parametrize(("hosts", "per_host"), [(2, 1), (2, 2)])
def test_a_shaped_link_has_its_rate(hosts: int, per_host: int, tmp_path: Path) -> None:
    """At 100 Mbit/s, as all-reduces fit it. Ranks of a host share its link, which counts the headers of frames."""
    words = ["--only", "links", "--collectives", "all_reduce", "--max-mib", "4", "--seconds", "0.2", "--json", "b.json"]
    with Cluster(hosts, "100mbit") as cluster:
        codes = cluster.run([*BENCH, *words], per_host, environment(), cwd=tmp_path, stdout=subprocess.DEVNULL)
    assert codes == [0] * hosts * per_host
    fits = {fit["level"]: fit["bytes_per_s"] for fit in json.loads((tmp_path / "b.json").read_text())["fits"]}
    assert fits["across"] * per_host == pytest.approx(12.5e6 * PAYLOAD, rel=0.05 * per_host)
    if per_host > 1:
        assert fits["inside"] > 10 * fits["across"]
        # A ring crosses the border of a host once. Between its messages, the bucket takes tokens for a burst.
        assert fits["all"] == pytest.approx(12.5e6 * PAYLOAD, rel=0.2)
