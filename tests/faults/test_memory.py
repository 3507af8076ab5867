"""A rank takes more memory than its control group has: the kernel kills it, as on a node that is full."""

import contextlib
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faults import events, trouble, whole

from trainer.errors import GAVE_UP

pytestmark = pytest.mark.slow


@pytest.fixture
def group() -> Iterator[Path]:
    """64 MiB, for what a process takes after it has joined."""
    own = re.search("^[0-9]+:memory:(.*)", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    if own is None:
        pytest.skip("no controller of memory (cgroup v1) here")
    folder = Path(f"/sys/fs/cgroup/memory{own[1]}", f"echelon-{secrets.token_hex(6)}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group of our own: {error}")
    for limit in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):  # without and with swap
        with contextlib.suppress(FileNotFoundError):
            (folder / limit).write_text(str(64 << 20))
    yield folder
    deadline = time.monotonic() + 5  # for those that are just ending
    while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    folder.rmdir()


def killed(group: Path) -> int:
    (count,) = re.findall("oom_kill ([0-9]+)", (group / "memory.oom_control").read_text())
    return int(count)


def test_40_the_kernel_kills_a_rank(golden, group, tmp_path):
    result = trouble(f"fill {group}", tmp_path)
    assert result.code == 0, result.err
    assert killed(group) == 1
    assert "echelon: rank 1 was killed by SIGKILL; its log: runs/r/logs/rank1.log; memory ran out" in result.err
    assert result.out.count("resumed from ckpt/r/step-00000004") == 1 and len(events(tmp_path)) == 1
    whole(tmp_path, golden)


def test_40_before_the_first_step_it_is_final(group, tmp_path):
    """Another attempt would take as much."""
    result = trouble(f"fill {group}", tmp_path, attempts=9999, where="startup")
    assert (result.code, killed(group)) == (128 + 9, 1)
    (line,) = (line for line in result.err.splitlines() if line.startswith("echelon: "))
    assert line.startswith("echelon: rank 1 was killed by SIGKILL; its log: runs/r/logs/rank1.log; memory ran out")


def test_40_again_and_again(group, tmp_path):
    result = trouble(f"fill {group}", tmp_path, attempts=9999)
    assert (result.code, killed(group)) == (GAVE_UP, 3)
    assert result.err.rstrip().endswith("given up; the kernel kills where memory is short: try a smaller micro_batch")
    assert (tmp_path / "ckpt" / "r" / "step-00000004" / "MANIFEST.json").exists()
