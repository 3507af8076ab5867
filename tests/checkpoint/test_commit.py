"""Which checkpoint a resume takes, which ones stay, and what a commit that fails leaves."""

import errno
import logging
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.checkpoints import hidden, holds, put, steps

from trainer.checkpoint.fence import Superseded
from trainer.checkpoint.locate import checkpoints, newest, resolve
from trainer.checkpoint.manifest import Damaged
from trainer.checkpoint.retention import retain, set_aside
from trainer.errors import ConfigError


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
        ("a\0b", r"=\'a\\x00b\'\.\.\.: is no path; give .*auto$"),
        ("a" * 5000, r"=\'a{60}\'\.\.\.: is no path; give .*auto$"),
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


def test_retention_keeps_the_newest_valid_and_the_best(run: Path) -> None:
    losses = {1: 5.0, 2: 1.0, 3: 1.0, 4: None, 5: 3.0, 6: 2.0}
    for step, loss in losses.items():
        put(run, step, metrics={} if loss is None else {"val/loss": loss, "val/accuracy": -loss})
    put(run, 7)  # without metrics at all
    (run / "step-00000006" / "state.json").write_bytes(b"")
    (run / "step-00000099").mkdir()  # torn: doesn't count
    base = run.with_name("base")
    shutil.copytree(run, base)

    def left(keep: int, best: str | None, every: int | None = None) -> list[int]:
        shutil.rmtree(run)
        shutil.copytree(base, run)
        retain(run, keep, best, every)
        assert hidden(run) == []
        return steps(run)

    assert left(2, None) == [5, 6, 7, 99]
    assert left(2, "val/loss") == [2, 5, 6, 7, 99]
    assert left(3, "max val/accuracy") == [2, 4, 5, 6, 7, 99]
    assert left(2, "max val/loss") == [1, 5, 6, 7, 99]
    assert left(3, "val/unknown") == [4, 5, 6, 7, 99]
    assert left(2, None, every=2) == [2, 4, 5, 6, 7, 99]
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


def test_another_history_where_there_are_no_links(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        put(run, step)
    (run.parent / "last.pt").unlink()
    monkeypatch.setattr(os, "symlink", Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted")))
    assert len(set_aside(run, 1)) == 1 and steps(run) == [1]


def test_a_commit_sweeps_and_puts_back(run: Path) -> None:
    for step in (1, 2):
        put(run, step)
    os.rename(run / "step-00000002", run / ".old-step-00000002-0a1b2c3d")  # killed between the two renames
    shutil.copytree(run / "step-00000001", run / ".old-step-00000001-0a1b2c3d")  # killed after both
    (run / ".tmp-00000003-0").mkdir()
    put(run, 3)
    assert [holds(path) for path in checkpoints(run)] == [(1, 1), (2, 2), (3, 3)] and hidden(run) == []


def test_a_writer_taken_for_dead_cannot_commit(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.mkdir(parents=True)
    fsync, successor = os.fsync, iter([5])

    def slow(descriptor: int) -> None:
        fsync(descriptor)
        for step in successor:
            put(run, step)

    monkeypatch.setattr(os, "fsync", slow)
    with pytest.raises(Superseded):
        put(run, 4)
    assert steps(run) == [5] and hidden(run) == []


def test_an_error_leaves_nothing_of_the_try(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(run, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            put(run, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
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
    real = os.statvfs(run)
    for free, fits in ((11_001, True), (10_999, False)):  # 1.1 times what is to be written
        fields = list(real)
        fields[1], fields[4] = 1, free  # f_frsize, f_bavail
        monkeypatch.setattr(os, "statvfs", lambda path, fields=fields: os.statvfs_result(fields))
        if fits:
            put(run, 2)
            shutil.rmtree(run / "step-00000002")
        else:
            with pytest.raises(OSError, match="MiB are free") as error:
                put(run, 2)
            assert error.value.errno == errno.ENOSPC and steps(run) == [1]


@pytest.fixture
def few_inodes(run: Path) -> Iterator[None]:
    run.parent.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=40", "none", str(run.parent)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("not root, or one that may not mount: inodes can't be used up")
    yield
    subprocess.run(["umount", str(run.parent)], check=True)


@pytest.mark.usefixtures("few_inodes")
def test_a_disk_that_has_room_but_no_inodes(run: Path) -> None:
    """They are used up at any moment of a commit."""
    put(run, 1)
    fillers = [run.parent / f"filler-{n}" for n in range(os.statvfs(run).f_favail)]
    for filler in fillers:
        filler.touch()
    failures = 0
    while True:
        try:
            put(run, 2)
            break
        except OSError as error:
            assert error.errno == errno.ENOSPC
        found = resolve("auto", run.parent, run)
        assert found is not None and holds(found) in {(1, 1), (2, 2)} and hidden(run) == []
        fillers.pop().unlink()
        failures += 1
    assert failures >= 4 and steps(run) == [1, 2] and hidden(run) == []
