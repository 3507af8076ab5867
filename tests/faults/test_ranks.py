"""Ranks are killed, hang, or fail: the run is started again, and ends with the bits of one in which nothing did."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from support.cli import MAIN, PYTHONPATH, popen, run
from support.faults import (
    IMPATIENT,
    RUN,
    below,
    ended_s,
    events,
    hung,
    notes,
    pids,
    recorded,
    resumed,
    trouble,
    troubling,
    wait_for,
    whole,
)

from trainer.errors import GAVE_UP

HUNG = "echelon: rank(s) 1 did not end and had to be killed: the likely cause; its log: runs/r/logs/rank1.log"
FAULTS = {
    "1 kill -9 of a rank": ("SIGKILL", 1, "echelon: rank 1 was killed by SIGKILL; its log: runs/r/logs/rank1.log"),
    "1 kill -9 of a rank that has started a program": (
        "start SIGKILL",
        1,
        "echelon: rank 1 was killed by SIGKILL; its",
    ),
    "2 kill -9 of rank 0": ("SIGKILL", 0, "echelon: rank 0 was killed by SIGKILL; its log: runs/r/logs/rank0.log"),
    "3 kill -9 of every rank": ("SIGKILL", -1, "was killed by SIGKILL; its log: runs/r/logs/rank"),
    "8 a segmentation fault": ("SIGSEGV", 1, "echelon: rank 1 was killed by SIGSEGV; its log: runs/r/logs/rank1.log"),
    "9 an early end that looks like success": ("exit 0", 1, "echelon: rank(s) 1 ended with code 0 before"),
    "9 another exit code": ("exit 7", 1, "echelon: rank 1 ended with code 7; its log: runs/r/logs/rank1.log"),
    "10 an exception in a callback": ("raise", 2, "RuntimeError: trouble at step 7"),
    "12 SIGSTOP": ("SIGSTOP", 1, HUNG),
    "13 a rank that holds the interpreter": ("hold", 1, HUNG),
    "40 a data worker is killed": ("worker", 1, "echelon: rank"),  # 1 tells, or has to be killed as it ends
    "40 out of memory": ("memory", 2, ": out of memory; peak "),
}
FAST = "1 kill -9 of a rank"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [pytest.param(f, marks=() if f == FAST else pytest.mark.slow) for f in FAULTS])
def test_a_fault_costs_steps_and_nothing_else(golden, tmp_path, fault):
    what, rank, said = FAULTS[fault]
    waits_s = 8 if what in ("SIGSTOP", "hold") else 0  # until the collectives of the others end
    result = trouble(what, tmp_path, *([f"trainer.timeout_s={waits_s}"] if waits_s else []), rank=rank)
    assert result.code == 0, result.err
    assert said in result.err and resumed(result.out) == [4]
    whole(tmp_path, golden)
    if what == "SIGSTOP":
        recorded(tmp_path, 0, 2)
    noted = events(tmp_path)
    assert len(noted) == 1 and said in noted[0]["failed"] and rank in (noted[0]["rank"], -1)
    assert f"echelon: failed after step {noted[0]['step']}; restart 1 of 3" in result.err
    if waits_s:
        assert ended_s(tmp_path) < waits_s + 10
    else:
        assert set(hung(tmp_path)) <= {rank}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_in_a_checkpoint_and_in_validation(golden, tmp_path):
    """One run, whose rank 0 dies in validation, in the middle of a write, and between a rename and retention."""
    where = "eval mid_write after_commit"
    result = trouble("SIGKILL", tmp_path, "trainer.checkpoint.keep=2", rank=0, step=5, where=where, attempts=3)
    assert result.code == 0, result.err
    made = [(line["where"], line["trouble"]) for line in notes(tmp_path) if "trouble" in line]
    assert made == list(zip(where.split(), (6, 8, 8)))
    assert resumed(result.out) == [4, 4, 8]
    whole(tmp_path, golden)


@pytest.mark.slow
def test_a_kill_before_there_is_a_checkpoint(golden, tmp_path):
    """It starts from the beginning."""
    result = trouble("SIGKILL", tmp_path, rank=0, step=3, where="before_commit")
    assert result.code == 0 and resumed(result.out) == []
    whole(tmp_path, golden)


PLACES = {"after_fetch": 1, "after_forward": 1, "after_backward": 1, "before_step": 1, "eval": 2}
PLACES |= {"snapshot": 0, "before_commit": 0, "retention": 0}


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
def test_a_kill_anywhere_else(golden, tmp_path, where):
    result = trouble("SIGKILL", tmp_path, "trainer.checkpoint.keep=2", rank=PLACES[where], where=where)
    assert result.code == 0, result.err
    assert len(resumed(result.out)) == len(events(tmp_path)) == 1
    assert [line["where"] for line in notes(tmp_path) if "trouble" in line] == [where]
    whole(tmp_path, golden)


@pytest.mark.slow
def test_5_kills_while_it_starts(golden, tmp_path):
    result = trouble("SIGKILL", tmp_path, rank=2, attempts=3, where="startup")
    assert result.code == 0 and result.err.count("failed before its first step; restart") == 3
    whole(tmp_path, golden)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "rank", "said"),
    [
        ("raise", 1, "RuntimeError: trouble at step 7"),
        ("memory", -2, "'+callbacks=[auto_batch]' (finds micro_batch itself)"),
    ],
    ids=["11 an exception", "40 out of memory, on another rank each time"],
)
def test_the_same_again_and_again_is_given_up(what, rank, said, tmp_path):
    result = trouble(what, tmp_path, rank=rank, attempts=9999)
    assert result.code == GAVE_UP
    assert result.err.rstrip().endswith(f"{said}\nechelon: the same failure 3 times after step 6: given up")
    assert [event["code"] for event in events(tmp_path)] == [0, 0, GAVE_UP]
    assert [event["rank"] for event in events(tmp_path)] == ([0, 1, 2] if rank == -2 else [rank] * 3)
    assert (tmp_path / "ckpt" / "r" / "step-00000004" / "MANIFEST.json").exists()


def test_a_mistake_that_is_there_from_the_first_step_is_told_at_once(tmp_path):
    result = trouble("raise", tmp_path, attempts=9999, step=1)
    assert result.code == 1 and result.err.count("trouble at step 1") == 1
    refused = run([*RUN, "batch=13"], tmp_path)
    assert refused.code == 78 and refused.err.count("echelon") == 1


@pytest.mark.slow
def test_where_no_rank_moves_all_are_killed_with_their_stacks_in_the_logs(golden, tmp_path):
    """Nothing else would notice: none of them waits for another."""
    result = trouble("sleep 3600", tmp_path, IMPATIENT, rank=-1)
    assert result.code == 0
    assert "echelon: no rank has moved for too long; the stacks of all are in runs/r/logs" in result.err
    assert ended_s(tmp_path) < 2 * 8 + 10
    whole(tmp_path, golden)
    recorded(tmp_path, 0, 1, 2)
    for rank in (1, 2):
        log = (tmp_path / "runs" / "r" / "logs" / f"rank{rank}.log").read_text()
        assert "most recent call first" in log and "in make_trouble" in log


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_12_a_rank_stops_while_it_writes_its_own_file(tmp_path):
    """Of a checkpoint: its residual."""
    topk = ["+callbacks=[grad_compress]", "callbacks.grad_compress.codec=topk"]
    (straight := tmp_path / "straight").mkdir()
    assert run([*RUN, *topk], straight).code == 0
    result = trouble("SIGSTOP", tmp_path, IMPATIENT, *topk, where="stage")
    assert result.code == 0 and HUNG in result.err and resumed(result.out) == [4], result.err
    assert ended_s(tmp_path) < 100
    whole(tmp_path, straight)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_disk_hangs_and_a_rank_is_killed(golden, tmp_path):
    """Rank 0 completes a checkpoint before it ends: not one that never moves."""
    hangs = troubling("sleep 3600", rank=0, where="mid_write")
    process = popen([*RUN, IMPATIENT, *hangs], tmp_path)
    assert process.stdout is not None
    try:
        while "about to make trouble" not in process.stdout.readline():
            assert process.poll() is None
        os.kill(pids(tmp_path)[1], signal.SIGKILL)
        killed = time.time()
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0 and "echelon: rank 1 was killed by SIGKILL" in err, err
    assert events(tmp_path)[0]["time"] - killed < 100 and resumed(out) == [4]
    assert "in make_trouble" in (tmp_path / "runs" / "r" / "logs" / "rank0.log").read_text()
    whole(tmp_path, golden)


STUCK = """
import os
import time
from toy_recipe import Toy

class Stuck(Toy):
    def data(self, split):
        if (os.environ.get("RANK"), os.environ.get("ECHELON_ATTEMPT")) == ("1", "0"):
            time.sleep(3600)
        return super().data(split)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rank_that_hangs_before_its_first_step(golden, tmp_path):
    """Its peers wait for it without a limit, as for one that prepares a corpus."""
    (tmp_path / "stuck.py").write_text(STUCK)
    stuck = ["recipe._target_=stuck.Stuck", "trainer.allow_targets=[toy_recipe,probe,stuck]", IMPATIENT]
    result = run([*RUN, *stuck], tmp_path, timeout_s=300, PYTHONPATH=os.pathsep.join([str(tmp_path), PYTHONPATH]))
    assert result.code == 0
    assert "echelon: no rank has moved for too long; the stacks of all are in runs/r/logs" in result.err
    assert "in data" in (tmp_path / "runs" / "r" / "logs" / "rank1.log").read_text()
    whole(tmp_path, golden)


@pytest.mark.slow
def test_the_fork_server_is_killed(golden, tmp_path):
    """The ranks run on."""
    result = trouble("server SIGKILL", tmp_path)
    assert (result.code, result.err) == (0, "") and not events(tmp_path)
    whole(tmp_path, golden)


@pytest.mark.slow
def test_the_fork_server_is_killed_and_then_a_rank(golden, tmp_path):
    """The next attempt has a new server."""
    process = popen([*RUN, *troubling("SIGKILL"), "callbacks.probe.step_s=0.3"], tmp_path)
    try:
        wait_for(tmp_path / "ckpt" / "r" / "step-00000004")
        os.kill(min(pid for pid in below(process.pid) if b"forkserver" in command(pid)), signal.SIGKILL)  # it was first
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0 and "rank 1 was killed by SIGKILL" in err and resumed(out) == [4]
    whole(tmp_path, golden)


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
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
    whole(tmp_path, straight, 60)


@pytest.mark.slow
def test_a_single_rank_that_hangs_ends_by_itself(tmp_path):
    """Nobody has started it who could notice. At a terminal it does not: somebody may be in a debugger."""
    alone = [*RUN, "trainer.devices=1", "data.workers=0", "trainer.timeout_s=3", *troubling("sleep 3600", rank=0)]
    result = run(alone, tmp_path, ["sh", "-c", 'exec "$@" </dev/null', "sh", *MAIN], timeout_s=100)
    assert result.code == 124 and "Timeout" in result.err and "in make_trouble" in result.err
