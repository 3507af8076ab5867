"""What a commit that fails, or that another process has overtaken, leaves."""

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import hidden, holds, put, steps

from trainer.checkpoint.fence import Superseded
from trainer.checkpoint.locate import resolve


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
