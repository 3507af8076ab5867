"""Anything of a run is killed at any moment, for as long as told: what comes out is what a run gives without."""

import itertools
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
from command import MAIN, environment, run
from troubled import RUN, alive, events, whole

SOAK_S = float(os.environ.get("ECHELON_SOAK_S", "600"))
STEPS, KILLS = 100, 6  # of one run
LONG = [*RUN, f"trainer.max_steps={STEPS}", "trainer.restarts=99"]


class Shaken(NamedTuple):
    kills: int
    recovered_s: list[float]  # from a kill to the next step


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S + 900)
def test_7_kills_of_anything_at_any_moment(tmp_path):
    seed = int(os.environ.get("ECHELON_SEED", time.time_ns() % 10**6))
    print(f"ECHELON_SEED={seed}", flush=True)
    draw, golden, until = random.Random(seed), tmp_path / "golden", time.monotonic() + SOAK_S
    golden.mkdir()
    assert run(LONG, golden, timeout_s=300).code == 0
    kills, restarts, recovered = 0, 0, list[float]()
    for n in itertools.count(1):
        (cwd := tmp_path / str(n)).mkdir()
        shaken = shake(draw, cwd)
        whole(cwd, golden, STEPS)
        kills, restarts, recovered = kills + shaken.kills, restarts + len(events(cwd)), recovered + shaken.recovered_s
        times = f"median {statistics.median(recovered):.1f} s, worst {max(recovered):.1f} s" if recovered else "none"
        print(f"{n} runs, {kills} kills, {restarts} restarts; time to recover: {times}", flush=True)
        if time.monotonic() > until:
            return
        shutil.rmtree(cwd)


def shake(draw: random.Random, cwd: Path) -> Shaken:
    """A run with kills. After each attempt's first step, rank 0 writes its facts."""
    (private := cwd / "tmp").mkdir()
    with open(cwd / "output", "w") as output:
        words, env = [*MAIN, *LONG, "callbacks.probe.step_s=0.05"], environment(TMPDIR=str(private))
        process = subprocess.Popen(words, cwd=cwd, env=env, stdout=output, stderr=output)
    kills, began, seen, due = list[float](), set[float](), set[int](), soon(draw)
    facts = cwd / "runs" / "r" / "facts-0.json"
    try:
        while process.poll() is None:
            time.sleep(0.02)
            with suppress(FileNotFoundError):
                if (at := facts.stat().st_mtime) not in began:
                    began.add(at)
                    due = min(due, time.monotonic() + draw.uniform(0, 5))
            seen |= (tree := below(process.pid))
            if tree and time.monotonic() > due and len(kills) < KILLS:
                with suppress(ProcessLookupError):
                    os.kill(draw.choice(sorted(tree)), signal.SIGKILL)
                    kills.append(time.time())
                due = soon(draw)
    finally:
        process.kill()
    assert process.returncode == 0, (cwd / "output").read_text()[-5000:]
    assert not list(private.glob("echelon-*"))
    deadline = time.monotonic() + 5
    while left := [pid for pid in seen if alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    ends = [min((at for at in began if at > kill), default=0.0) for kill in kills]
    last = dict(zip(ends, kills))  # of kills in a row the last one: the others were not recovered from
    return Shaken(len(kills), [end - kill for end, kill in last.items() if end])


def soon(draw: random.Random) -> float:
    """When the next kill is: at times while ranks start, else not before they have made a step."""
    return time.monotonic() + draw.uniform(0, 10) if draw.random() < 0.3 else math.inf


def below(pid: int) -> set[int]:
    """The processes that this one has started, and those that they have."""
    found = set[int]()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found |= {int(child) for child in file.read_text().split()}
    return found.union(*map(below, found)) if found else found
