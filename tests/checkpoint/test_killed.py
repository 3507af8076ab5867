"""A commit that is killed, or fails, at any system call loses nothing, and neither does a power loss."""

import contextlib
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from written import NAMES, hidden, holds, put

from trainer.checkpoint import commit as commit_module
from trainer.checkpoint.commit import resolve
from trainer.checkpoint.manifest import MANIFEST, Damaged, verify

REPO = str(Path(commit_module.__file__).parents[2])
# Starts in 0.05 s, and can't import torch: -S leaves site-packages out.
WRITER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from trainer.checkpoint.commit import begin, commit, publish, retain
run, step, fill = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
files = dict.fromkeys(("model.safetensors", "state.json"), memoryview(bytes([fill]) * 5000))
try:
    os.unlink("/dev/null/begin")  # marks the begin in strace's log
except NotADirectoryError:
    pass
try:
    attempt = begin(run)
    publish(commit(run, step, files, {}, attempt), attempt)
    retain(run, 2, None, None)
except OSError as error:
    sys.exit(f"errno {error.errno}")
"""
CHANGES = {"mkdir", "mkdirat", "write", "fsync", "rename", "renameat", "renameat2", "symlink", "symlinkat", "unlink"}
CHANGES |= {"unlinkat", "rmdir", "fchmod", "chmod"}
READS = {"openat", "read", "newfstatat", "fstat", "statfs", "getdents64", "readlink", "close"}


class Point(NamedTuple):
    call: str
    number: int  # counted from the start of the process


def strace(run: Path, step: int, fill: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["strace", "-f", "-qq", "-y", "-s", "0", *options]
    python = [sys.executable, "-S", "-E", "-B", "-c", WRITER, REPO, str(run), str(step), str(fill)]
    return subprocess.run([*command, *python], check=False, capture_output=True, text=True)


def log_of(run: Path, step: int, fill: int, calls: set[str]) -> list[str]:
    log = run.parents[1] / "strace.log"
    done = strace(run, step, fill, "-o", str(log), "-e", "trace=" + ",".join("?" + call for call in sorted(calls)))
    assert done.returncode == 0, done.stderr
    return [line.split(maxsplit=1)[1] for line in log.read_text().splitlines()]


def points(log: list[str]) -> list[Point]:
    found: list[Point] = []
    seen: Counter[str] = Counter()
    begun = False
    for line in log:
        call = line.split("(")[0]
        seen[call] += 1
        if begun:
            found.append(Point(call, seen[call]))
        begun = begun or "/dev/null/begin" in line
    return found


@pytest.fixture(scope="session")
def needs_strace() -> None:
    if shutil.which("strace") is None:
        pytest.skip("no strace, so no kills at system calls")
    probe = ["strace", "-f", "-o", "/dev/null", "-e", "inject=rmdir:error=EIO", "true"]
    done = subprocess.run(probe, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"strace is not permitted here: no kills at system calls ({done.stderr.strip()})")


def prepare(run: Path, case: str) -> tuple[int, set[tuple[int, int]]]:
    """Checkpoints on disk, the step that is written next (full of 9), and what may be the newest after a fault."""
    if case == "replace the only one":
        put(run, 3)
        return 3, {(3, 3), (3, 9)}
    for step in (1, 2, 3):
        put(run, step)
    if case == "replace a damaged one":
        (run / "step-00000003" / "state.json").write_bytes(b"")
        return 3, {(2, 2), (3, 9)}
    for name in (".tmp-00000004-0", ".trash-step-00000001-0"):
        (run / name).mkdir()
        (run / name / "state.json").write_bytes(b"debris")
    return 4, {(3, 3), (4, 9)}


def valid(run: Path) -> list[Path]:
    """Whole by their manifests and sizes, as retention counts them."""
    found = []
    for path in run.glob("step-*"):
        with contextlib.suppress(Damaged):
            verify(path, hashes=False)
            found.append(path)
    return found


CASES = ["next", "replace the only one", "replace a damaged one"]
KILL, FULL, BROKEN = "signal=SIGKILL", "error=ENOSPC", "error=EIO"


def sweep(run: Path, case: str, faults: tuple[str, ...], calls: set[str]) -> int:
    step, allowed = prepare(run, case)
    root, base = run.parent, run.parents[1] / "base"
    shutil.copytree(root, base, symlinks=True)
    before, hit = valid(run), points(log_of(run, step, 9, calls))
    assert {"mkdir", "write", "fsync", "rename", "symlink"} <= {point.call for point in hit}
    for point in hit:
        for fault in faults if point.call in CHANGES else (BROKEN,):  # a kill at a read is one at the next change
            shutil.rmtree(root)
            shutil.copytree(base, root, symlinks=True)
            inject = f"inject={point.call}:{fault}:when={point.number}"
            log = root.with_name("strace.log")
            done = strace(run, step, 9, "-o", str(log), "-e", f"trace={point.call}", "-e", inject)
            where = f"{case}: {inject}: exit {done.returncode} {done.stderr}"
            if fault == KILL:
                assert done.returncode == -9, where
            else:
                assert "(INJECTED)" in log.read_text(), where
                assert done.returncode == 0 or done.stderr.startswith("errno "), where
            found = resolve("auto", root, run)
            assert found is not None and holds(found) in allowed, where
            assert len(valid(run)) >= min(2, len(before)), where
            put(run, step + 1)
            found = resolve(str(root / "last.pt"), root, None)
            assert found is not None and holds(found) == (step + 1, step + 1), where
            assert [name for name in hidden(run) if not name.startswith(".bad-")] == [], where
    return len(hit)


@pytest.mark.usefixtures("needs_strace")
@pytest.mark.parametrize("case", CASES[:2])
def test_killed_at_any_change_loses_nothing(run: Path, case: str) -> None:
    assert sweep(run, case, (KILL,), CHANGES) > 15


@pytest.mark.usefixtures("needs_strace")
def test_an_error_at_any_change_loses_nothing(run: Path) -> None:
    assert sweep(run, "replace the only one", (FULL,), CHANGES) > 15


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("needs_strace")
@pytest.mark.parametrize("case", CASES)
def test_every_fault_at_every_call_loses_nothing(run: Path, case: str) -> None:
    assert sweep(run, case, (KILL, FULL, BROKEN), CHANGES | READS) > 80


def order_errors(events: list[tuple[str, str]], run: Path) -> list[str]:
    """What a power loss could undo: chains of events of which one comes before the last of an earlier kind."""
    staging = next(path for call, path in events if call == "fsync" and "/.tmp-" in path).rpartition("/")[0]
    manifest, final, link = f"{staging}/{MANIFEST}", f"{run}/step-00000004", f"{run.parent}/.last.pt-run"
    chains = [[("write", f"{staging}/{name}"), ("fsync", f"{staging}/{name}"), ("write", manifest)] for name in NAMES]
    chains.append([("write", manifest), ("fsync", manifest), ("fsync", staging), ("rename", final)])
    chains.append([("rename", final), ("fsync", str(run)), ("symlink", link)])
    chains.append([("symlink", link), ("rename", f"{run.parent}/last.pt"), ("fsync", str(run.parent))])
    begins = [("write", f"{run}/ATTEMPT"), ("fsync", f"{run}/ATTEMPT"), ("fsync", str(run))]
    begun = events[: events.index(("mkdir", staging))]
    pairs = [(events, chain) for chain in chains] + [(begun, begins)]
    places = [
        [max((i for i, e in enumerate(part) if e == event), default=-1) for event in chain] for part, chain in pairs
    ]
    return [str(chain) for (_, chain), place in zip(pairs, places) if -1 in place or place != sorted(place)]


@pytest.mark.usefixtures("needs_strace")
def test_order_survives_a_power_loss(run: Path) -> None:
    put(run, 3)
    events: list[tuple[str, str]] = []
    for line in log_of(run, 4, 9, CHANGES):
        call, _, arguments = line.partition("(")
        paths = (
            re.findall(r"^[0-9]+<(.*?)>", arguments)
            if call in ("write", "fsync")
            else re.findall(r'"(.*?)"', arguments)
        )
        events.append((re.sub("(at|at2)$", "", call), paths[-1]))  # of two paths: the target
    assert order_errors(events, run) == []
    for i, (call, _) in enumerate(events):
        if call == "fsync":  # the check itself: it misses every one of them
            assert order_errors(events[:i] + events[i + 1 :], run)
