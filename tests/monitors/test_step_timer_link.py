"""A link that is slow, between hosts of network namespaces: what it takes beside computing is communication."""

import json
import subprocess

import pytest
from support.cli import MAIN, MARK, PYTHONPATH, QUICK, TOY
from support.faults import free_port
from support.network import Cluster, needs_cluster

pytestmark = [needs_cluster, pytest.mark.slow, pytest.mark.timeout(180)]

WIDTH, MBIT = 256, 20
BYTES = 4 * (9 * WIDTH + 2 * (WIDTH + 1) * WIDTH + 4 * (WIDTH + 1))  # of the toy's gradients
STEPS = ["trainer.max_steps=8", "trainer.log_every_steps=4", "trainer.validate_every=null", "trainer.run_dir=run"]


def test_a_slow_link_is_communication(tmp_path) -> None:
    """Two ranks send each other half of the gradients twice, so all of their bytes each way."""
    words = [*MAIN, *TOY, *QUICK, f"recipe.width={WIDTH}", "trainer.devices=auto", *STEPS]
    with Cluster(hosts=2, rate=f"{MBIT}mbit") as cluster:
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": cluster.address(0), "MASTER_PORT": str(free_port())}
        env |= {"PYTHONPATH": PYTHONPATH, MARK: str(tmp_path)}
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path}
        ranks = [cluster.popen(rank, words, env={**env, "RANK": str(rank)}, **pipe) for rank in range(2)]
        for rank in ranks:
            told = rank.communicate(timeout=120)[0]
            assert rank.returncode == 0, told
    *_, last = (json.loads(line) for line in (tmp_path / "run" / "step_times.jsonl").read_text().splitlines())
    wire = BYTES * 8 / (MBIT * 1e6)
    for times in last["ranks"]:
        assert times["communication"] > 0.8 * wire and times["communication"] > 0.8 * times["step"], (wire, times)
        print(wire, times)
