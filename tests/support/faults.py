"""A run on 3 ranks in which something goes wrong, and what is asked of it afterwards: tests/faults."""

import contextlib
import json
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support import ranks
from support.cli import MARK, QUICK, TOY, Result, lines, run
from trainer.checkpoint.manifest import Damaged, verify

RUN = [*TOY, *QUICK, "+callbacks=[probe]", "trainer.devices=3", "batch=12", "data.workers=1", "trainer.max_steps=12"]
RUN += ["trainer.run_dir=runs/r", "trainer.checkpoint.every_steps=4", "trainer.checkpoint.keep=9"]
RUN += ["trainer.log_every_steps=1", "trainer.validate_every=6"]
IMPATIENT = "trainer.timeout_s=8"  # of a collective; ranks start within less of each other
RECOVERED: list[float] = []  # seconds from each fault of this test to the first step after it


def trouble(
    what: str, cwd: Path, *more: str, attempts: int = 1, rank: int = 1, step: int = 7, where: str = "after_step"
) -> Result:
    return run([*RUN, *troubling(what, attempts, rank, step, where), *more], cwd, timeout_s=240)


def troubling(what: str, attempts: int = 1, rank: int = 1, step: int = 7, where: str = "after_step") -> list[str]:
    """The arguments by which it makes trouble."""
    knobs = {"trouble": f"'{what}'", "rank": rank, "step": step, "attempts": attempts, "where": f"'{where}'"}
    return [f"callbacks.probe.{key}={value}" for key, value in knobs.items()]


@contextlib.contextmanager
def watched(cwd: Path) -> Iterator[None]:
    """From when a run in this folder has a valid checkpoint, it has one at every moment."""
    had, lost = set[Path](), set[Path]()

    def look(over: threading.Event) -> None:
        while not over.wait(0.03):
            valid = {run_dir for run_dir in (cwd / "ckpt").glob("*") if has_valid(run_dir)}
            lost.update(had - valid)
            had.update(valid)

    with beside(look):
        yield
    assert not lost


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread, until it sees the event."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def has_valid(run_dir: Path) -> bool:
    for _ in range(3):  # the one that it finds may be deleted before it is read: then there is another
        for path in sorted(run_dir.glob("step-*"), reverse=True):
            with contextlib.suppress(Damaged):
                return bool(verify(path, hashes=False))
    return False


def whole(cwd: Path, golden: Path, step: int = 12, kept: str = "", launchers: int = 0) -> None:
    """Nothing was lost or repeated, and nothing is left, as of `tidy`."""
    for name in ("model", "optimizer"):
        file = f"ckpt/r/step-{step:08d}/{name}.safetensors"
        assert (cwd / file).read_bytes() == (golden / file).read_bytes()
    assert lines(cwd / "runs" / "r") == lines(golden / "runs" / "r")
    tidy(cwd, kept=kept, launchers=launchers)
    RECOVERED.extend(recovered(cwd))


def tidy(cwd: Path, name: str = "r", kept: str = "", launchers: int = 0) -> None:
    """No process is left, no half checkpoint, and nothing in the test's TMPDIR. `kept`: the damaged checkpoints that
    are, by their hidden names' beginning; `launchers`: so many were killed, which nobody can clean up after."""
    nobody_left(cwd)
    hidden = {path.name for path in (cwd / "ckpt" / name).iterdir() if path.name.startswith(".")}
    assert {name for name in hidden if not (kept and name.startswith(kept))} == {".lock"}
    assert len(list(Path(os.environ["TMPDIR"]).glob("echelon-*"))) <= 2 * launchers
    assert has_valid(cwd / "ckpt" / name)


def nobody_left(cwd: Path, within_s: float = 3.0) -> None:
    """Whatever its parent is by now, a process of the run has the mark."""
    deadline, empty = time.monotonic() + within_s, 0  # in the middle of an exec a process shows no mark: look twice
    while empty < 2:
        left = processes(cwd)
        assert not left or time.monotonic() < deadline, left
        empty = 0 if left else empty + 1
        time.sleep(0.02)


def processes(cwd: Path) -> list[int]:
    """Of the run in this folder, however they were started; zombies are not among them.

    An interpreter has the mark in its environment. A process of support/forked.py has not, but the folder of its run.
    """
    found, mark, own = list[int](), f"{MARK}={cwd}".encode(), {os.getpid(), *(peer.pid for peer, _ in ranks.PEERS)}
    for pid in set(map(int, filter(str.isdecimal, os.listdir("/proc")))) - own:
        with contextlib.suppress(OSError):
            marked = mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if marked or os.readlink(f"/proc/{pid}/cwd") == str(cwd):
                found.append(pid)
    return sorted(found)


def notes(cwd: Path) -> list[dict[str, Any]]:
    """The probe's: the first step of each attempt, and each time that it made trouble."""
    return [json.loads(line) for line in (cwd / "runs" / "r" / "probe.jsonl").read_text().splitlines()]


def resumed(said: str) -> list[int]:
    """The steps that attempts went on from."""
    return [int(step) for step in re.findall(r"resumed from \S*ckpt/r/step-(\d{8}) ", said)]


def recovered(cwd: Path) -> list[float]:
    """The seconds from each time that the probe has made trouble to the first step of the attempt after it."""
    firsts = sorted(note["time"] for note in notes(cwd) if "first" in note)
    faults = [note["time"] for note in notes(cwd) if "trouble" in note]
    after = {next((first for first in firsts if first > fault), 0.0): fault for fault in faults}
    return [first - fault for first, fault in after.items() if first]


def ended_s(cwd: Path) -> float:
    """The seconds from the first trouble that the probe has made until its attempt was over."""
    return events(cwd)[0]["time"] - min(note["time"] for note in notes(cwd) if "trouble" in note)


def hung(cwd: Path) -> list[int]:
    """Ranks that had to be killed, of whose stacks the supervisor therefore asked. One that has told of its failure by
    then was slow to end, no more; rank 0 tells the supervisor alone."""
    logs = [path.read_text() for path in sorted((cwd / "runs" / "r" / "logs").glob("rank?.log"))]
    asked = [rank for rank, log in enumerate(logs) if "most recent call first" in log]
    return [rank for rank in asked if "Traceback" not in logs[rank]]


def pids(cwd: Path) -> list[int]:
    """Of the ranks, once each has made a step; in their order."""
    facts = sorted((cwd / "runs" / "r").glob("facts-*.json"))
    return [json.loads(path.read_text())["pid"] for path in facts]


def events(cwd: Path) -> list[dict[str, Any]]:
    """What the supervisor has noted of attempts that failed."""
    path = cwd / "runs" / "r" / "logs" / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def recorded(cwd: Path, *ranks: int) -> None:
    """Torch's flight recorder has left the last collectives of each."""
    for rank in ranks:
        entries = json.loads((cwd / "runs" / "r" / "logs" / f"collectives-rank{rank}.json").read_text())["entries"]
        assert len(entries) > 10 and any("all_reduce" in entry["profiling_name"] for entry in entries)


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def below(pid: int) -> set[int]:
    """The processes that this one has started, and those that they have."""
    found = set[int]()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= {int(child) for child in file.read_text().split()}
    return found.union(*map(below, found)) if found else found


def free_port() -> int:
    """Of those that `launch` gives SLURM's jobs."""
    while True:
        port = random.randrange(20000, 40000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 110
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
