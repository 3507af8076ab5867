"""Anything of a run is killed at any moment, for as long as told: what comes out is what a run gives without."""

import itertools
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from support.cli import MAIN, MARK, environment, run
from support.faults import RUN, events, nobody_left, processes, watched, whole

SOAK_S = float(os.environ.get("ECHELON_SOAK_S", "600"))
STEPS, KILLS = 100, 6  # of one run
LONG = [*RUN, f"trainer.max_steps={STEPS}", "trainer.restarts=99", "trainer.resume=auto"]


class Shaken(NamedTuple):
    kills: int
    launchers: int  # of these
    recovered_s: list[float]  # from a kill to the next step


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S + 900)
def test_7_kills_of_anything_at_any_moment(tmp_path):
    seed = int(os.environ.get("ECHELON_SEED", time.time_ns() % 10**6))
    print(f"ECHELON_SEED={seed}", flush=True)
    draw, golden, until = random.Random(seed), tmp_path / "golden", time.monotonic() + SOAK_S
    golden.mkdir()
    assert run(LONG, golden, timeout_s=300).code == 0
    kills, launchers, restarts, recovered = 0, 0, 0, list[float]()
    for n in itertools.count(1):
        (cwd := tmp_path / str(n)).mkdir()
        with watched(cwd):
            shaken = shake(draw, cwd)
        kills, launchers = kills + shaken.kills, launchers + shaken.launchers
        whole(cwd, golden, STEPS, launchers=launchers)
        restarts, recovered = restarts + len(events(cwd)), recovered + shaken.recovered_s
        times = f"median {statistics.median(recovered):.1f} s, worst {max(recovered):.1f} s" if recovered else "none"
        print(f"{n} runs, {kills} kills, {launchers} of launchers, {restarts} restarts; recovered: {times}", flush=True)
        if time.monotonic() > until:
            return
        shutil.rmtree(cwd)


def shake(draw: random.Random, cwd: Path) -> Shaken:
    """A run with kills; where the launcher's was one, the same command goes on."""
    process, facts = start(cwd), cwd / "runs" / "r" / "facts-0.json"
    kills, launchers, began, due = list[float](), 0, set[float](), soon(draw)
    try:
        while process.poll() in (None, -signal.SIGKILL):
            if process.returncode:
                launchers += 1
                nobody_left(cwd)
                process = start(cwd)
            time.sleep(0.02)
            with suppress(FileNotFoundError):
                if (at := facts.stat().st_mtime) not in began:  # rank 0 writes them after its first step
                    began.add(at)
                    due = min(due, time.monotonic() + draw.uniform(0, 5))
            if time.monotonic() > due and len(kills) < KILLS:
                with suppress(ProcessLookupError, IndexError):  # it has just ended
                    os.kill(draw.choice(sorted(processes(cwd))), signal.SIGKILL)
                    kills.append(time.time())
                due = soon(draw)
    finally:
        process.kill()
    assert process.returncode == 0, (cwd / "output").read_text()[-5000:]
    ends = [min((at for at in began if at > kill), default=0.0) for kill in kills]
    last = dict(zip(ends, kills))  # of kills in a row the last one: the others were not recovered from
    return Shaken(len(kills), launchers, [end - kill for end, kill in last.items() if end])


def start(cwd: Path) -> subprocess.Popen[bytes]:
    words, env = [*MAIN, *LONG, "callbacks.probe.step_s=0.05"], environment(**{MARK: str(cwd)})
    with open(cwd / "output", "a") as output:
        return subprocess.Popen(words, cwd=cwd, env=env, stdout=output, stderr=output)


def soon(draw: random.Random) -> float:
    """When the next kill is: at times while ranks start, else not before they have made a step."""
    return time.monotonic() + draw.uniform(0, 10) if draw.random() < 0.3 else math.inf


class Rows(NamedTuple):
    step: int
    bytes: dict[int, int]  # by process


def private(pid: int) -> int:
    """Bytes of a process that are no file's: its own, and its share of those that it shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
    return sizes["Pss_Anon"] + sizes["Pss_Shmem"]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_memory_is_flat_over_20000_steps_and_100_epochs(tmp_path):
    """Of launcher, ranks and data workers, with a validation and a checkpoint every 1,000 steps."""
    steps, metrics = 20_000, tmp_path / "runs" / "r" / "metrics.jsonl"
    words = [*RUN, f"trainer.max_steps={steps}", "batch=24", "trainer.validate_every=1000", "recipe.samples=2400"]
    words += ["trainer.checkpoint.every_steps=1000", "data.workers=1", "callbacks.probe.step_s=0"]
    with watched(tmp_path), open(tmp_path / "output", "a") as output:
        process = subprocess.Popen(
            [*MAIN, *words], cwd=tmp_path, env=environment(**{MARK: str(tmp_path)}), stdout=output, stderr=output
        )
        seen = list[Rows]()
        while process.poll() is None:
            time.sleep(1)
            with suppress(FileNotFoundError, ProcessLookupError, IndexError, KeyError):
                step = json.loads(metrics.read_text().splitlines()[-1])["step"]
                seen.append(Rows(step, {pid: private(pid) for pid in sorted(processes(tmp_path))}))
    assert process.returncode == 0, (tmp_path / "output").read_text()[-5000:]
    early = next(row for row in seen if row.step >= steps // 5)
    late = next(row for row in reversed(seen) if row.bytes.keys() == early.bytes.keys())
    grown = {pid: late.bytes[pid] - early.bytes[pid] for pid in early.bytes}
    print(f"bytes at step {early.step}: {early.bytes}; more at step {late.step}: {grown}", flush=True)
    assert late.step > 0.9 * steps and len(grown) >= 5 and max(grown.values()) < 2 << 20
