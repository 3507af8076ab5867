"""Peers: the disk of the checkpoints is full while the second is written; then there is room, and they run again."""

import os
import shutil
import subprocess

import pytest
from support.peers import checkpoint, launch, samples, saved, steps

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="not root: no disk of a size of its own"),
]


def test_a_full_disk(peer, golden, tmp_path):
    """Each ends. The one before is whole, and is found, but for Accelerate: until someone deletes the half one."""
    (disk := tmp_path / "ckpt").mkdir()
    if (done := subprocess.run(["mount", "-t", "tmpfs", "-o", "size=420k", "none", str(disk)])).returncode:
        pytest.skip(f"this root may not mount: {done}")
    try:
        result = launch(peer, tmp_path, restarts=0)
        assert result.code == 1 and max(steps(tmp_path)[0]) in (7, 8)
        assert saved(peer, tmp_path) == {4, 8}
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        if peer == "accelerate":
            assert launch(peer, tmp_path, restarts=0).code == 1
            shutil.rmtree(checkpoint(peer, tmp_path, 8))
        result = launch(peer, tmp_path, restarts=0)
        assert result.code == 0, result.err
        assert steps(tmp_path)[0][-8:] == [5, 6, 7, 8, 9, 10, 11, 12]
        assert samples(tmp_path) == samples(golden)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
