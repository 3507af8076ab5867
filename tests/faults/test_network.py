"""Hosts whose network goes away, or nearly: all ranks end, and the same command goes on once it is back."""

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.cli import MAIN, MARK, PYTHONPATH, run
from support.faults import IMPATIENT, RUN, free_port, troubling, wait_for, whole
from support.network import Cluster, needs_cluster

pytestmark = [needs_cluster, pytest.mark.slow, pytest.mark.timeout(240)]
SLOWLY = "callbacks.probe.step_s=0.5"  # so that a fault hits a step, not a checkpoint
WIDE = "recipe.width=512"  # 2 MB of gradients


def start(cluster: Cluster, cwd: Path, *more: str) -> list[Any]:
    """A rank on each host, as a launcher does that Echelon doesn't know."""
    words = [*MAIN, *RUN, "trainer.devices=auto", "trainer.resume=auto", IMPATIENT, *more]
    env = {"WORLD_SIZE": "3", "MASTER_ADDR": cluster.address(0), "MASTER_PORT": str(free_port())}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": cwd}
    env |= {"PYTHONPATH": PYTHONPATH, MARK: str(cwd)}
    each = [{**env, "RANK": str(rank)} for rank in range(3)]
    return [cluster.popen(rank, words, env=each[rank], **pipe) for rank in range(3)]


def end(ranks: list[Any]) -> list[tuple[int, str]]:
    """Exit code of each, and what it told."""
    told = [rank.communicate(timeout=90)[1] for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, told, strict=True)]


def all_failed(ranks: list[Any]) -> None:
    for code, told in end(ranks):
        assert code not in (0, 75)
        assert re.search(
            "Timed out waiting 8000ms|timeout|closed by peer|reset by peer", told.rstrip().splitlines()[-1]
        ), told


def test_31_a_link_that_goes_down(golden, tmp_path):
    with Cluster(hosts=3) as cluster:
        link = ["ip", "-n", cluster.switch, "link", "set", "p2"]
        ranks = start(cluster, tmp_path, SLOWLY)
        wait_for(tmp_path / "ckpt" / "r" / "step-00000004")
        subprocess.run([*link, "down"], check=True)
        all_failed(ranks)
        subprocess.run([*link, "up"], check=True)
        assert [code for code, _ in end(start(cluster, tmp_path))] == [0, 0, 0]
    whole(tmp_path, golden)


def test_31_a_link_that_goes_down_while_all_wait_for_the_disk(golden, tmp_path):
    """The checkpoint of step 8 waits for that of step 4, however long that takes; not for hosts that are gone."""
    with Cluster(hosts=3) as cluster:
        link = ["ip", "-n", cluster.switch, "link", "set", "p2"]
        ranks = start(cluster, tmp_path, *troubling("disk 30", rank=0, step=3))
        wait_for(metrics := tmp_path / "runs" / "r" / "metrics.jsonl")
        while '"step": 8' not in metrics.read_text():
            assert ranks[0].poll() is None
            time.sleep(0.1)
        time.sleep(12)  # longer than the limit of a collective
        assert [rank.poll() for rank in ranks] == [None] * 3
        subprocess.run([*link, "down"], check=True)
        all_failed(ranks)
        subprocess.run([*link, "up"], check=True)
        assert [code for code, _ in end(start(cluster, tmp_path))] == [0, 0, 0]
    whole(tmp_path, golden)


def test_32_a_link_that_is_too_slow(tmp_path):
    straight = tmp_path / "straight"
    straight.mkdir()
    assert run([*RUN, WIDE], straight).code == 0
    with Cluster(hosts=3) as cluster:
        ranks = start(cluster, tmp_path, SLOWLY, WIDE)
        wait_for(tmp_path / "ckpt" / "r" / "step-00000004")
        cluster.shape("64kbit")
        all_failed(ranks)
        cluster.shape(None)
        assert [code for code, _ in end(start(cluster, tmp_path, WIDE))] == [0, 0, 0]
    whole(tmp_path, straight)
