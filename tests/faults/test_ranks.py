"""Ranks are killed, hang, or fail: the run is started again, and ends with the bits of one in which nothing did."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from command import lines, popen, run
from troubled import IMPATIENT, RUN, events, trouble, wait_for, whole

from trainer.supervisor import GAVE_UP

FAULTS = {
    "1 kill -9 of a rank": ("SIGKILL", 1, "echelon: rank 1 was killed by SIGKILL; its log: runs/r/logs/rank1.log"),
    "2 kill -9 of rank 0": ("SIGKILL", 0, "echelon: rank 0 was killed by SIGKILL; its log: runs/r/logs/rank0.log"),
    "3 kill -9 of every rank": ("SIGKILL", -1, "was killed by SIGKILL; its log: runs/r/logs/rank"),
    "8 a segmentation fault": ("SIGSEGV", 1, "echelon: rank 1 was killed by SIGSEGV; its log: runs/r/logs/rank1.log"),
    "9 an early end that looks like success": ("exit 0", 1, "failed first"),
    "9 another exit code": ("exit 7", 1, "echelon: rank 1 ended with code 7; its log: runs/r/logs/rank1.log"),
    "10 an exception in a callback": ("raise", 2, "RuntimeError: trouble at step 7"),
    "12 SIGSTOP": ("SIGSTOP", 1, "failed first"),
    "13 a rank that holds the interpreter": ("hold", 1, "failed first"),
    "40 a data worker is killed": ("worker", 1, "failed first"),
    "40 out of memory": ("memory", 2, "echelon: out of memory; try a smaller micro_batch"),
}
FAST = ("1 ", "10 ")


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=() if f.startswith(FAST) else pytest.mark.faults) for f in FAULTS]
)
def test_a_fault_costs_steps_and_nothing_else(golden, tmp_path, fault):
    what, rank, said = FAULTS[fault]
    result = trouble(what, tmp_path, *([IMPATIENT] if what in ("SIGSTOP", "hold") else []), rank=rank)
    assert result.code == 0, result.err
    assert said in result.err and result.out.count("resumed from ckpt/r/step-00000004") == 1
    whole(tmp_path, golden)
    noted = events(tmp_path)
    assert len(noted) == 1 and said in noted[0]["failed"]
    assert f"echelon: failed after step {noted[0]['step']}; restart 1 of 3" in result.err


@pytest.mark.faults
def test_5_kills_while_it_starts(golden, tmp_path):
    result = trouble("start: SIGKILL", tmp_path, rank=2, attempts=3)
    assert result.code == 0 and result.err.count("failed before its first step; restart") == 3
    whole(tmp_path, golden)


def test_before_the_first_checkpoint_it_starts_from_the_beginning(golden, tmp_path):
    assert trouble("SIGKILL", tmp_path, step=3).code == 0
    whole(tmp_path, golden)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise", "RuntimeError: trouble at step 7"),
        pytest.param("memory", "or trainer.precision=bf16", marks=pytest.mark.faults),
    ],
    ids=["11 an exception", "40 out of memory"],
)
def test_the_same_again_and_again_is_given_up(what, said, tmp_path):
    result = trouble(what, tmp_path, attempts=9999)
    assert result.code == GAVE_UP
    assert result.err.rstrip().endswith(f"{said}\nechelon: the same 3 times after step 6: given up")
    assert [event["code"] for event in events(tmp_path)] == [0, 0, GAVE_UP]
    assert (tmp_path / "ckpt" / "r" / "step-00000004" / "MANIFEST.json").exists()


def test_a_mistake_that_is_there_from_the_first_step_is_told_at_once(tmp_path):
    result = trouble("raise", tmp_path, attempts=9999, step=1)
    assert result.code == 1 and result.err.count("trouble at step 1") == 1
    refused = run([*RUN, "batch=13"], tmp_path)
    assert refused.code == 78 and refused.err.count("echelon") == 1


def test_14_a_stop_is_no_failure(tmp_path):
    process = popen([*RUN, "trainer.max_steps=100000", "callbacks.probe.step_s=0.02"], tmp_path)
    try:
        wait_for(tmp_path / "ckpt" / "r" / "step-00000004")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75 and not (tmp_path / "runs/r/logs/events.jsonl").exists()


@pytest.mark.faults
def test_where_no_rank_moves_all_are_killed_with_their_stacks_in_the_logs(golden, tmp_path):
    """Nothing else would notice: none of them waits for another."""
    result = trouble("sleep 3600", tmp_path, IMPATIENT, rank=-1)
    assert result.code == 0
    assert "echelon: no rank has moved for too long; the stacks of all are in runs/r/logs" in result.err
    whole(tmp_path, golden)
    for rank in (1, 2):
        log = (tmp_path / "runs" / "r" / "logs" / f"rank{rank}.log").read_text()
        assert "most recent call first" in log and "in make_trouble" in log


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_6_ten_kills_at_random(golden, tmp_path):
    """A regression of pytorch#135712 would be a restart that fails."""
    draw, seed = random.Random(), int(os.environ.get("ECHELON_SEED", time.time_ns() % 10**6))
    draw.seed(seed)
    print(f"ECHELON_SEED={seed}")
    longer = [*RUN, "trainer.max_steps=60"]
    process = popen([*longer, "callbacks.probe.step_s=0.05", "trainer.restarts=10"], tmp_path)
    pids = {0}
    try:
        for n in range(10):
            facts = tmp_path / "runs" / "r" / f"facts-{draw.randrange(3)}.json"
            wait_for(tmp_path / "ckpt" / "r" / f"step-{4 * (n + 1):08d}")
            wait_for(facts)
            while (pid := json.loads(facts.read_text())["pid"]) in pids or not Path(f"/proc/{pid}").exists():
                time.sleep(0.02)
            time.sleep(draw.uniform(0, 0.3))
            pids |= {json.loads(path.read_text())["pid"] for path in facts.parent.glob("facts-*.json")}
            os.kill(pid, signal.SIGKILL)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0 and len(events(tmp_path)) == 10, err
    straight = tmp_path / "straight"
    straight.mkdir()
    assert run(longer, straight).code == 0
    for name in ("model", "optimizer"):
        file = f"ckpt/r/step-00000060/{name}.safetensors"
        assert (tmp_path / file).read_bytes() == (straight / file).read_bytes()
    assert lines(tmp_path / "runs" / "r") == lines(straight / "runs" / "r")
