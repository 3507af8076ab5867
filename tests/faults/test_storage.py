"""Ranks that don't see the same checkpoints: none begins."""

import os
import shutil
import subprocess

import pytest
from command import MAIN, popen
from troubled import RUN, free_port

# A folder of its own under the same name, for this process alone.
ELSEWHERE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none ckpt && exec "$@"', "sh", *MAIN]


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: no mount that one process alone sees")
def test_30_a_rank_that_does_not_see_the_checkpoint(golden, tmp_path):
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this root may not make mount namespaces")
    shutil.copytree(golden, tmp_path, dirs_exist_ok=True, symlinks=True)
    before = sorted(path.name for path in (tmp_path / "ckpt" / "r").iterdir())
    words = [*RUN, "trainer.devices=auto", "trainer.resume=ckpt/r/step-00000004"]
    env = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [popen(words, tmp_path, ELSEWHERE if n == 1 else MAIN, RANK=str(n), **env) for n in range(3)]
    try:
        told = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [78] * 3
    said = "echelon: trainer.resume=ckpt/r/step-00000004: rank 1 does not see rank 0's checkpoint"
    (line,) = set(told)
    assert line.startswith(f"{said} ({tmp_path}/ckpt/r/step-00000004: is missing); give all ranks")
    assert line.count("\n") == 1
    assert sorted(path.name for path in (tmp_path / "ckpt" / "r").iterdir()) == before
