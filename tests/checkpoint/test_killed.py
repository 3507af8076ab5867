"""A commit that is killed, or fails, at any system call loses nothing, and neither does a power loss."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.checkpoints import NAMES, hidden, holds, put

from trainer.checkpoint import commit
from trainer.checkpoint.locate import resolve
from trainer.checkpoint.manifest import MANIFEST, Damaged, verify

REPO = str(Path(commit.__file__).parents[2])
# Forks for each line that it reads, and prints the process's id and exit code: a Python of its own would take ten times
# as long as the commit. Can't import torch: -S leaves site-packages out.
WRITERS = """
import ctypes, errno, os, signal, sys, traceback
sys.path.insert(0, sys.argv[1])
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from trainer.checkpoint.commit import begin, commit, commit_staged, discard, publish, stage
from trainer.checkpoint.fence import Attempt
from trainer.checkpoint.retention import retain

COMMON = ("model.safetensors", "state.json")

def files(fill, *names):
    return dict.fromkeys(names, memoryview(bytes([fill]) * 5000))

def section(rank, kind):
    return f"{kind}-{rank:05d}.safetensors", f"{kind}-{rank:05d}.json"

def whole(run, step, fill):
    attempt = begin(run)
    publish(commit(run, step, files(fill, *COMMON), {}, attempt), attempt)
    retain(run, 2, None, None)

def alone(run, step, fill):
    stage(run, step, files(fill, *section(1, "rank")), Attempt(1, ""), lambda: None)

def first(pipes, run, step, fill):
    attempt = begin(run)
    for pipe in pipes:
        pipe.send(attempt)
    try:
        parts = [stage(run, step, files(fill, *COMMON, *section(0, "part")), attempt, lambda: None)]
        parts += [pipe.recv() for pipe in pipes]
    except EOFError:
        discard(run, step, attempt)
        raise
    publish(commit_staged(run, step, parts, {}, attempt), attempt)
    retain(run, 2, None, None)

def other(rank, pipe, run, step, fill):
    attempt = pipe.recv()
    pipe.send(stage(run, step, files(fill, *section(rank, "part")), attempt, lambda: None))

def ended(work):
    try:
        work()
    except OSError as error:
        return error.errno
    except EOFError:  # another rank has ended
        return errno.ECANCELED
    except BaseException:
        traceback.print_exc()
        return 255
    return 0

def fork(work, traced, unused=()):
    if pid := os.fork():
        return pid
    for pipe in unused:
        pipe.close()
    if traced:
        ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))  # PR_SET_PTRACER: strace is not its parent
        signal.sigwait({signal.SIGUSR1})
    os._exit(ended(work))

def fork_ranks(arguments, traced):
    links = {1: Pipe(), 2: Pipe()}
    zero, far = [zero for zero, _ in links.values()], [far for _, far in links.values()]
    works = {0: partial(first, zero, *arguments)}
    works |= {rank: partial(other, rank, pipe, *arguments) for rank, (_, pipe) in links.items()}
    keep = {0: zero} | {rank: [pipe] for rank, (_, pipe) in links.items()}
    pids = [
        fork(work, rank == traced, [pipe for pipe in zero + far if pipe not in keep[rank]])
        for rank, work in works.items()
    ]
    for pipe in zero + far:
        pipe.close()
    return pids

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
for line in sys.stdin:
    run, step, fill, kind = line.split()
    arguments, traced = (Path(run), int(step), int(fill)), 0
    if kind.startswith("part-"):
        traced = int(kind[-1])
        pids = fork_ranks(arguments, traced)
    else:
        pids = [fork(partial(alone if kind == "rank" else whole, *arguments), True)]
    print(pids[traced], flush=True)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(codes[traced], flush=True)
"""
RANKS = (0, 1, 2)
PARTS = {f"part-{rank:05d}.{end}" for rank in RANKS for end in ("safetensors", "json")}
CHANGES = {"mkdir", "mkdirat", "write", "fsync", "rename", "renameat", "renameat2", "symlink", "symlinkat", "unlink"}
CHANGES |= {"unlinkat", "rmdir", "fchmod", "chmod", "fallocate", "pwrite64"}
READS = {"openat", "read", "newfstatat", "fstat", "statfs", "getdents64", "readlink", "close"}


class Point(NamedTuple):
    call: str
    number: int  # counted from the begin of the commit


class Traced(NamedTuple):
    code: int  # the errno of an OSError; 255 for any other error
    log: list[str]


class Writers:
    """A context: processes that commit, each under strace from its first system call on."""

    # Or "rank": stages the files that a rank other than 0 has; "part-N": three ranks commit, of which N is traced.
    kind = "whole"

    def __enter__(self) -> "Writers":
        words = [sys.executable, "-S", "-E", "-B", "-c", WRITERS, REPO]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def write(self, run: Path, step: int, fill: int, *options: str) -> Traced:
        assert self.process.stdin and self.process.stdout
        print(run, step, fill, self.kind, file=self.process.stdin, flush=True)
        pid, log = int(self.process.stdout.readline()), run.parents[1] / "strace.log"
        words = ["strace", "--quiet=exit", "-y", "-s", "0", "-o", str(log), "-p", str(pid), *options]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as strace:
            assert strace.stderr
            told = strace.stderr.readline()  # that it has stopped the process
            os.kill(pid, signal.SIGUSR1)
            code = int(self.process.stdout.readline())
        if not told.endswith("attached\n"):
            raise PermissionError(told)
        return Traced(code, log.read_text().splitlines())


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Writers]:
    if shutil.which("strace") is None:
        pytest.skip("no strace, so no kills at system calls")
    with Writers() as writers:
        try:
            writers.write(tmp_path_factory.mktemp("probe") / "ckpt" / "run", 1, 1, "-e", "inject=rmdir:error=EIO")
        except PermissionError as error:
            pytest.skip(f"strace is not permitted here: no kills at system calls ({error})")
        yield writers


def log_of(writers: Writers, run: Path, step: int, calls: set[str], *options: str) -> list[str]:
    trace = "trace=" + ",".join("?" + call for call in sorted(calls))
    done = writers.write(run, step, 9, "-e", trace, *options)
    assert done.code == 0
    return done.log


def points(log: list[str]) -> list[Point]:
    found: list[Point] = []
    seen: Counter[str] = Counter()
    for line in log:
        call = line.split("(")[0]
        seen[call] += 1
        found.append(Point(call, seen[call]))
    return found


def prepare(run: Path, case: str) -> tuple[int, set[tuple[int, int]]]:
    """Checkpoints on disk, the step that is written next (full of 9), and what may be the newest after a fault."""
    if case == "replace the only one":
        put(run, 3)
        return 3, {(3, 3), (3, 9)}
    for step in (1, 2, 3):
        put(run, step)
    if case == "a rank's own":
        return 4, {(3, 3)}
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
KILL, FULL, BROKEN, QUOTA, READ_ONLY = (
    "signal=SIGKILL",
    *(f"error={name}" for name in ("ENOSPC", "EIO", "EDQUOT", "EROFS")),
)


def sweep(writers: Writers, run: Path, case: str, faults: tuple[str, ...], calls: set[str], *options: str) -> set[str]:
    """The calls at which faults were made."""
    step, allowed = prepare(run, case)
    root, base = run.parent, run.parents[1] / "base"
    shutil.copytree(root, base, symlinks=True)
    before, hit = valid(run), points(log_of(writers, run, step, calls, *options))
    for point in hit:
        for fault in faults if point.call in CHANGES else (BROKEN,):  # a kill at a read is one at the next change
            shutil.rmtree(root)
            shutil.copytree(base, root, symlinks=True)
            inject = f"inject={point.call}:{fault}:when={point.number}"
            done = writers.write(run, step, 9, "-e", f"trace={point.call}", *options, "-e", inject)
            where = f"{case}: {inject}: exit {done.code}"
            if fault == KILL:
                assert done.code == -9, where
            else:
                made = [line for line in done.log if line.startswith(f"{point.call}(")]
                assert "(INJECTED)" in made[point.number - 1], where
                claim = point.call in ("fallocate", "pwrite64") and fault in (FULL, QUOTA)
                assert claim <= done.code < 255, where  # a disk that is full is told of before anything is written
            found = resolve("auto", root, run)
            assert found is not None and holds(found) in allowed, where
            assert {path.name for path in found.iterdir()} - {MANIFEST, *NAMES} in (set(), PARTS), where
            assert len(valid(run)) >= min(2, len(before)), where
            put(run, step + 1)
            found = resolve(str(root / "last.pt"), root, None)
            assert found is not None and holds(found) == (step + 1, step + 1), where
            assert [name for name in hidden(run) if not name.startswith(".bad-")] == [], where
    return {point.call for point in hit}


USUAL = {"mkdir", "fallocate", "write", "fsync", "rename", "symlink"}


@pytest.mark.parametrize("case", CASES[:2])
def test_killed_at_any_change_loses_nothing(writers: Writers, run: Path, case: str) -> None:
    assert sweep(writers, run, case, (KILL,), CHANGES) > USUAL


def test_a_rank_killed_at_any_change_of_its_own_files_loses_nothing(
    writers: Writers, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has no entries of it, so commits nothing; the next attempt deletes what is left."""
    monkeypatch.setattr(writers, "kind", "rank")
    calls = {"mkdir", "fallocate", "write", "fsync"}
    assert sweep(writers, run, "a rank's own", (KILL, FULL), CHANGES) >= calls


@pytest.mark.parametrize("rank", RANKS)
def test_one_of_three_ranks_killed_at_any_change_loses_nothing(
    writers: Writers, run: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Each rank writes a part: the checkpoint is the old one, or has all parts."""
    monkeypatch.setattr(writers, "kind", f"part-{rank}")
    calls = {"mkdir", "fallocate", "write", "fsync"} | (set() if rank else USUAL)
    assert sweep(writers, run, "replace the only one", (KILL,) if rank == 0 else (KILL, FULL), CHANGES) >= calls


@pytest.mark.slow
def test_an_error_at_any_change_loses_nothing(writers: Writers, run: Path) -> None:
    assert sweep(writers, run, "replace the only one", (FULL, QUOTA), CHANGES) > USUAL


def test_a_disk_whose_room_is_claimed_block_by_block(writers: Writers, run: Path) -> None:
    """By the C library, where the file system can't claim it."""
    calls = {"fallocate", "pwrite64"}
    unable = ("-e", "trace=" + ",".join(calls), "-e", "inject=fallocate:error=EOPNOTSUPP")
    assert sweep(writers, run, "next", (KILL, FULL, QUOTA), calls, *unable) == calls


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_every_fault_at_every_call_loses_nothing(writers: Writers, run: Path, case: str) -> None:
    assert sweep(writers, run, case, (KILL, FULL, BROKEN, QUOTA, READ_ONLY), CHANGES | READS) > USUAL | {
        "openat",
        "close",
    }


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


def test_order_survives_a_power_loss(writers: Writers, run: Path) -> None:
    put(run, 3)
    events: list[tuple[str, str]] = []
    for line in log_of(writers, run, 4, CHANGES):
        call, _, arguments = line.partition("(")
        paths = (
            re.findall(r"^[0-9]+<(.*?)>", arguments)
            if call in ("write", "fsync", "fallocate")
            else re.findall(r'"(.*?)"', arguments)
        )
        events.append((re.sub("(at|at2)$", "", call), paths[-1]))  # of two paths: the target
    assert order_errors(events, run) == []
    for i, (call, _) in enumerate(events):
        if call == "fsync":  # the check itself: it misses every one of them
            assert order_errors(events[:i] + events[i + 1 :], run)
