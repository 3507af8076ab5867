"""A checkpoint survives kills, full disks and damage at every moment of its life, and the right one is chosen."""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from trainer.checkpoint import commit as commit_module
from trainer.checkpoint.commit import checkpoints, commit, newest, resolve, retain, set_aside
from trainer.checkpoint.manifest import MANIFEST, Damaged, verify
from trainer.errors import ConfigError

REPO = str(Path(commit_module.__file__).parents[2])
NAMES = ("model.safetensors", "state.json")
# Starts in 0.05 s, and can't import torch: -S leaves site-packages out.
WRITER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from trainer.checkpoint.commit import commit, retain
run, step, fill = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
def write(folder):
    for name in ("model.safetensors", "state.json"):
        (folder / name).write_bytes(bytes([fill]) * 5000)
try:
    os.unlink("/dev/null/begin")  # marks the begin in strace's log
except NotADirectoryError:
    pass
try:
    commit(run, step, write, {})
    retain(run, 2, None)
except OSError as error:
    sys.exit(f"errno {error.errno}")
"""
CHANGES = {"mkdir", "mkdirat", "write", "fsync", "rename", "renameat", "renameat2", "symlink", "symlinkat", "unlink"}
CHANGES |= {"unlinkat", "rmdir", "fchmod", "chmod"}
READS = {"openat", "read", "newfstatat", "fstat", "statfs", "getdents64", "readlink", "close"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "ckpt" / "run"


def put(run: Path, step: int, fill: int | None = None, **manifest: Any) -> Path:
    def write(folder: Path) -> None:
        for name in NAMES:
            (folder / name).write_bytes(bytes([step if fill is None else fill]) * 5000)

    return commit(run, step, write, manifest)


def holds(checkpoint: Path) -> tuple[int, int]:
    """Step by its name, and the byte that its files are full of: read without the code under test."""
    contents = [(checkpoint / name).read_bytes() for name in NAMES]
    assert contents[0] == contents[1] == contents[0][:1] * 5000
    return int(checkpoint.name.removeprefix("step-")), contents[0][0]


def steps(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoints(run)]


def hidden(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if path.name.startswith("."))


# Kills and errors at every system call.


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
        pytest.skip("strace is not installed (apt-get install strace): no kills at system calls")
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


CASES = ["next", "replace the only one", "replace a damaged one"]
KILL, FULL, BROKEN = "signal=SIGKILL", "error=ENOSPC", "error=EIO"


def sweep(run: Path, case: str, faults: tuple[str, ...], calls: set[str]) -> int:
    step, allowed = prepare(run, case)
    root, base = run.parent, run.parents[1] / "base"
    shutil.copytree(root, base, symlinks=True)
    hit = points(log_of(run, step, 9, calls))
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
    assert sweep(run, case, (KILL, FULL, BROKEN), CHANGES | READS) > 100


def test_an_error_leaves_nothing_of_the_try(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(run, 1)

    def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "disk full")

    with pytest.raises(OSError, match="disk full"):
        commit(run, 2, fail, {})
    with pytest.raises(ValueError, match="JSON"):
        put(run, 2, metrics={"val/loss": float("nan")})
    assert steps(run) == [1] and hidden(run) == []
    rename = os.rename

    def second(source: Any, target: Any) -> None:  # the old one is out of the way, the new one can't come in
        if Path(source).name.startswith(".tmp-"):
            raise OSError(errno.EIO, "broken")
        rename(source, target)

    monkeypatch.setattr(os, "rename", second)
    with pytest.raises(OSError, match="broken"):
        put(run, 1, fill=9)
    assert holds(run / "step-00000001") == (1, 1) and hidden(run) == []


def test_a_full_disk_is_seen_before_writing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(run, 1)
    size = sum(path.stat().st_size for path in (run / "step-00000001").iterdir())
    real = os.statvfs(run)
    for free, fits in ((int(1.1 * size) + 1, True), (int(1.1 * size) - 1, False)):
        fields = list(real)
        fields[1], fields[4] = 1, free  # f_frsize, f_bavail
        monkeypatch.setattr(os, "statvfs", lambda path, fields=fields: os.statvfs_result(fields))
        if fits:
            put(run, 2)
            shutil.rmtree(run / "step-00000002")
        else:
            with pytest.raises(OSError, match="MiB are free") as error:
                commit(run, 2, lambda folder: pytest.fail("written"), {})
            assert error.value.errno == errno.ENOSPC


def order_errors(events: list[tuple[str, str]], run: Path) -> list[str]:
    """What a power loss could undo: chains of events of which one comes before the last of an earlier kind."""
    staging = next(path for call, path in events if call == "fsync" and "/.tmp-" in path).rpartition("/")[0]
    manifest, final, link = f"{staging}/{MANIFEST}", f"{run}/step-00000004", f"{run.parent}/.last.pt-run"
    chains = [[("write", f"{staging}/{name}"), ("fsync", f"{staging}/{name}"), ("write", manifest)] for name in NAMES]
    chains.append([("write", manifest), ("fsync", manifest), ("fsync", staging), ("rename", final)])
    chains.append([("rename", final), ("fsync", str(run)), ("symlink", link)])
    chains.append([("symlink", link), ("rename", f"{run.parent}/last.pt"), ("fsync", str(run.parent))])
    places = [[max((i for i, e in enumerate(events) if e == event), default=-1) for event in chain] for chain in chains]
    return [str(chain) for chain, place in zip(chains, places) if -1 in place or place != sorted(place)]


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


# Damage.


def test_every_flipped_bit_is_seen(run: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "a.bin").write_bytes(bytes(range(40)))

    checkpoint = commit(run, 1, write, {"metrics": {"val/loss": 1.25}, "note": "\u00e9 and \n"})
    assert verify(checkpoint)["metrics"] == {"val/loss": 1.25}
    for path in sorted(checkpoint.iterdir()):
        content = path.read_bytes()
        for i in range(0, len(content) * 8, 3):  # every third bit: each place in a byte, and every byte
            flipped = bytearray(content)
            flipped[i // 8] ^= 1 << i % 8
            path.write_bytes(flipped)
            with pytest.raises(Damaged, match=path.name):
                verify(checkpoint)
        path.write_bytes(content)
    verify(checkpoint)


@pytest.mark.parametrize("name", [*NAMES, MANIFEST])
@pytest.mark.parametrize("hashes", [True, False])
def test_files_that_are_not_what_was_written(run: Path, name: str, hashes: bool) -> None:
    path = put(run, 1) / name
    content = path.read_bytes()

    def refused(why: str = "") -> None:
        with pytest.raises(Damaged, match=f"{re.escape(str(path))}: .*{why}"):
            verify(path.parent, hashes)
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)

    for wrong in (b"", content[:-1], content + b"x"):
        path.write_bytes(wrong)
        refused()
    refused("is missing")
    elsewhere = run / "elsewhere"
    elsewhere.write_bytes(content)
    path.symlink_to(elsewhere)
    refused("symbolic link")
    os.mkfifo(path)
    refused("plain file")
    path.mkdir()
    refused("plain file")
    path.write_bytes(content)
    assert verify(path.parent, hashes)["step"] == 1
    path.write_bytes(content[:-1] + b"?")  # the right size: only hashes see it, and a manifest's own is always compared
    if hashes or name == MANIFEST:
        refused()
    else:
        verify(path.parent, hashes)


def forge(checkpoint: Path, **changes: Any) -> None:
    """A manifest with a sha256 that fits: what an attacker, or another writer, would make."""
    manifest = {**json.loads((checkpoint / MANIFEST).read_text()), **changes}
    del manifest["sha256"]
    digest = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps({**manifest, "sha256": digest}, indent=1))


def test_forged_manifests(run: Path) -> None:
    checkpoint = put(run, 1)
    entry = json.loads((checkpoint / MANIFEST).read_text())["files"]["state.json"]
    (run / "state.json").write_bytes((checkpoint / "state.json").read_bytes())
    forge(checkpoint, note="fits")
    assert verify(checkpoint)["note"] == "fits"
    bad: list[dict[str, Any]] = [
        {"files": {name: entry}}
        for name in ("../state.json", str(run / "state.json"), "..", ".", "", "a/b", "state.json\n")
    ]
    bad += [
        {"files": {"state.json": wrong}} for wrong in ([5000], [True, entry[1]], ["5000", entry[1]], {}, None, "ab")
    ]
    bad += [{"files": []}, {"files": None}, {"format": 2}, {"format": None}, {"step": 2}, {"step": "1"}, {"step": True}]
    bad += [{"x": float("nan")}, {"x": float("inf")}]
    for changes in bad:
        forge(checkpoint, **changes)
        with pytest.raises(Damaged):
            verify(checkpoint)
        forge(checkpoint, files={"state.json": entry}, format=1, step=1, x=0)
        verify(checkpoint)


@pytest.mark.parametrize(
    "content", [b"{}", b"[]", b"null", b"1", b"NaN", b"\xff\xfe", b"[" * 100_000, b'{"sha256": 1}', b"\0" * 100]
)
def test_garbage_for_a_manifest(run: Path, content: bytes) -> None:
    path = put(run, 1) / MANIFEST
    path.write_bytes(content)
    with pytest.raises(Damaged, match=MANIFEST):
        verify(path.parent)


def test_a_huge_manifest_is_refused(run: Path) -> None:
    checkpoint = put(run, 1)
    for size, fits in ((1 << 20, True), (65 << 20, False)):
        forge(checkpoint, note="x" * size)
        if fits:
            verify(checkpoint)
        else:
            with pytest.raises(Damaged, match=MANIFEST):
                verify(checkpoint)


def test_damage_and_trouble_are_two_things(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files must not make a run forget its checkpoints; a disk that can't read one must."""
    put(run, 1)
    put(run, 2)
    opened = os.open

    def fail(code: int) -> None:
        def broken(path: Any, *args: Any, **kwargs: Any) -> int:
            if kwargs.get("dir_fd") is not None and "step-00000002" in os.readlink(f"/proc/self/fd/{kwargs['dir_fd']}"):
                raise OSError(code, os.strerror(code), path)
            return opened(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", broken)

    fail(errno.EMFILE)
    with pytest.raises(OSError, match="Too many open files"):
        newest(run)
    with pytest.raises(ConfigError, match=r"trainer\.resume=auto: .*Too many open files.*; "):
        resolve("auto", run.parent, run)
    assert steps(run) == [1, 2]
    fail(errno.EIO)
    assert newest(run) == run / "step-00000001"


# Which one.


def test_newest_goes_back_past_damage(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert newest(run) is None and checkpoints(run) == []
    for step in (99_999_999, 5, 100_000_000, 7):
        put(run, step, fill=step % 256)
    assert steps(run) == [5, 7, 99_999_999, 100_000_000]
    (run / "step-00000000").write_text("a file")
    for step in (99_999_999, 100_000_000):
        (run / f"step-{step}" / "state.json").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "echelon"):
        assert newest(run) == run / "step-00000007"
    assert [record.name for record in caplog.records] == ["echelon"] * 2
    assert "step-100000000/state.json: 0 bytes, its manifest says 5000" in caplog.text
    assert steps(run) == [5, 7] and [name[:13] for name in hidden(run)] == [".bad-step-100", ".bad-step-999"]
    put(run, 8)  # a commit leaves damaged ones for inspection
    assert len(hidden(run)) == 2


def test_none_valid_is_an_error_and_touches_nothing(run: Path) -> None:
    """A run must not start anew by itself over the remains of its old one."""
    for step in (1, 2):
        (put(run, step) / "state.json").unlink()
    for _ in range(2):
        with pytest.raises(Damaged, match=r"none of the 2 .*step-00000002/state\.json: is missing"):
            newest(run)
    with pytest.raises(Damaged, match=r"trainer\.resume=auto: none of the 2 .*; trainer\.resume=null starts anew"):
        resolve("auto", run.parent, run)
    assert steps(run) == [1, 2]


def test_auto(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    a, b = root / "a", root / "b"
    assert resolve("auto", root, None) is None and resolve("auto", root, a) is None
    put(a, 10)
    put(b, 5)
    put(a, 20)
    put(b, 6)
    os.utime(a / "step-00000010", (4e9, 4e9))  # by the clock a was written last, by last.pt b was
    assert resolve("auto", root, None) == b / "step-00000006"
    assert resolve("auto", root, a) == a / "step-00000020"
    assert resolve("auto", root, root / "c") is None
    (b / "step-00000006" / "state.json").unlink()
    assert resolve("auto", root, None) == b / "step-00000005"  # what last.pt names is gone, its run is not
    for target in (None, "gone/step-00000001", "last.pt"):
        (root / "last.pt").unlink(missing_ok=True)
        if target:
            (root / "last.pt").symlink_to(target)
        assert resolve("auto", root, None) == a / "step-00000020"


def test_paths(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = run.parent
    for step in (1, 2):
        put(run, step)
    second = run / "step-00000002"
    for path in (root / "last.pt", second, run, f"{run}/"):
        assert resolve(str(path), Path("unused"), None) == second
    monkeypatch.chdir(root)
    assert resolve("last.pt", Path("unused"), None) == second
    shutil.copytree(second, root / "kept for the paper")
    assert resolve("kept for the paper", Path("unused"), None) == root / "kept for the paper"
    assert os.readlink(root / "last.pt") == "run/step-00000002"


OLDER = r"; trainer\.resume=.*/run/step-00000001 is valid, or trainer\.resume=auto"


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("none", r"trainer\.resume=none: does not exist; give .*auto"),
        (".", r"trainer\.resume=\.: is not a checkpoint; give .*auto"),
        ("run/step-00000001/state.json", r"=run/step-00000001/state\.json: is not a checkpoint; give "),
        ("last.pt", r"=last\.pt: points to .*run/step-00000009, which does not exist; give "),
        ("loop", r"=loop: points to .*; give "),
        ("run/step-00000003", r"=run/step-00000003: .*MANIFEST\.json: is missing" + OLDER),
        ("run/step-00000002", r"=run/step-00000002: .*state\.json: 0 bytes.*" + OLDER),
        ("bad", r"=bad: none of the 1 checkpoints .*; trainer\.resume=null starts anew"),
    ],
)
def test_messages(run: Path, monkeypatch: pytest.MonkeyPatch, resume: str, message: str) -> None:
    for step in (1, 2):
        put(run, step)
    (run / "step-00000002" / "state.json").write_bytes(b"")
    (run / "step-00000003").mkdir()
    (put(run.parent / "bad", 1) / "state.json").unlink()
    monkeypatch.chdir(run.parent)
    Path("last.pt").unlink()
    Path("last.pt").symlink_to("run/step-00000009")
    Path("loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=message) as error:
        resolve(resume, Path("unused"), None)
    assert "\n" not in str(error.value)


# Which ones stay.


def test_retention_keeps_the_newest_valid_and_the_best(run: Path) -> None:
    losses = {1: 5.0, 2: 1.0, 3: 1.0, 4: None, 5: 3.0, 6: 2.0}
    for step, loss in losses.items():
        put(run, step, metrics={} if loss is None else {"val/loss": loss, "val/accuracy": -loss})
    put(run, 7)  # without metrics at all
    (run / "step-00000006" / "state.json").write_bytes(b"")
    (run / "step-00000099").mkdir()  # torn: doesn't count
    base = run.with_name("base")
    shutil.copytree(run, base)

    def left(keep: int, best: str | None) -> list[int]:
        shutil.rmtree(run)
        shutil.copytree(base, run)
        retain(run, keep, best)
        assert hidden(run) == []
        return steps(run)

    assert left(2, None) == [5, 6, 7, 99]
    assert left(1, "val/loss") == [2, 6, 7, 99]
    assert left(2, "max val/accuracy") == [2, 5, 6, 7, 99]
    assert left(1, "max val/loss") == [1, 6, 7, 99]
    assert left(3, "val/unknown") == [4, 5, 6, 7, 99]
    assert left(9, "val/loss") == [1, 2, 3, 4, 5, 6, 7, 99]


def test_another_history(run: Path) -> None:
    for step in (1, 2, 3):
        put(run, step)
    assert set_aside(run, 3) == [] and hidden(run) == []
    for again in range(2):
        names = set_aside(run, 1)
        assert [name[: len(".abandoned-step-00000002")] for name in names] == [
            ".abandoned-step-00000002",
            ".abandoned-step-00000003",
        ]
        assert steps(run) == [1] and holds(run / os.readlink(run.parent / "last.pt").removeprefix("run/")) == (1, 1)
        assert len(hidden(run)) == 2 * again + 2
        for step in (2, 3):
            put(run, step)
    assert len(set_aside(run, 0)) == 3 and checkpoints(run) == []


def test_a_commit_sweeps_and_puts_back(run: Path) -> None:
    for step in (1, 2):
        put(run, step)
    os.rename(run / "step-00000002", run / ".old-step-00000002-0a1b2c3d")  # killed between the two renames
    shutil.copytree(run / "step-00000001", run / ".old-step-00000001-0a1b2c3d")  # killed after both
    (run / ".tmp-00000003-0").mkdir()
    put(run, 3)
    assert [holds(path) for path in checkpoints(run)] == [(1, 1), (2, 2), (3, 3)] and hidden(run) == []


def test_a_writer_taken_for_dead_cannot_commit(run: Path) -> None:
    def slow(folder: Path) -> None:
        (folder / "a").write_bytes(b"x")
        put(run, 5)  # its successor

    with pytest.raises(FileNotFoundError):
        commit(run, 4, slow, {})
    assert steps(run) == [5] and hidden(run) == []
