"""When a run whose ranks fail is started again, and when not; what a heartbeat tells. Of ranks: tests/faults."""

import signal
import time

from trainer import heartbeat
from trainer.heartbeat import Beat
from trainer.supervisor import GAVE_UP, Failure, Restarts, Supervisor, find

KILLED = Failure(1, "echelon: rank 1 was killed by SIGKILL; its log: x", 137, False)
RAISED = Failure(1, "Traceback\nRuntimeError: x", 1, True)


def test_restarts_are_used_up_by_what_gets_no_further_and_come_back_with_a_step():
    restarts = Restarts(2)
    failures = [Failure(n, f"echelon: rank {n}", 137, False) for n in range(9)]  # no two alike
    assert [restarts.decide(failure, Beat(0, 5, 0))[0] for failure in failures[:3]] == [0, 0, 137]
    restarts = Restarts(2)
    assert [restarts.decide(failure, Beat(0, step, 0))[0] for step, failure in enumerate(failures)] == [0] * 9
    code, said = Restarts(0).decide(KILLED, Beat(0, 5, 0))
    assert code == 137 and said == ""


def test_what_another_try_would_meet_again_is_not_tried():
    for code in (70, 71, 78):
        assert Restarts(3).decide(Failure(0, "echelon: x", code, True), Beat(0, 5, 0))[0] == code
    assert Restarts(3).decide(RAISED, Beat(0, 0, 0)) == (1, "")  # not a step was made
    assert Restarts(3).decide(KILLED, Beat(0, 0, 0))[0] == 0  # but a kill may have come from anywhere
    assert Restarts(3).decide(RAISED, None) == (1, "")
    restarts = Restarts(9)
    assert [restarts.decide(RAISED, Beat(4, 7, 0))[0] for _ in range(3)] == [0, 0, GAVE_UP]


def test_what_never_came_to_a_step_is_no_loop():
    """A node that is short of something when ranks start may have it the next time."""
    restarts = Restarts(3)
    said = [restarts.decide(KILLED, None) for _ in range(4)]
    assert [code for code, _ in said] == [0, 0, 0, 137]
    assert said[0][1] == "echelon: failed before its first step; restart 1 of 3"
    assert said[3][1] == "echelon: 3 restarts came no further than step 0: given up"


def test_pauses_grow():
    restarts, pauses = Restarts(9), []
    for n in range(8):
        restarts.decide(Failure(n, "x", 137, False), Beat(0, 5, 0))
        pauses.append(restarts.pause_s)
    assert pauses == [0, 1, 3, 7, 15, 30, 30, 30]


def test_a_heartbeat_tells_the_step_and_that_a_long_one_comes(tmp_path):
    path = tmp_path / "heartbeat"
    assert heartbeat.read(path) is None
    beat = heartbeat.Heartbeat(str(path))
    beat.beat()
    assert heartbeat.read(path) is None  # not begun
    for step in (4, 5, 6):
        beat.beat(step)
    assert heartbeat.read(path) == Beat(4, 6, 0) and abs(path.stat().st_mtime - time.time()) < 60
    beat.beat(6, patience_s=1000)
    assert path.stat().st_mtime > time.time() + 900
    beat.beat(busy=True)
    assert heartbeat.read(path) == Beat(4, 6, 1)
    heartbeat.Heartbeat("").beat(3)
    path.write_bytes(b"torn")
    assert heartbeat.read(path) is None


def test_ranks_that_do_not_move_are_seen_once_all_have_begun(tmp_path):
    supervisor = Supervisor(lambda moved: [], 0, tmp_path / "logs", str, 3, still_s=50)
    assert not supervisor._is_still(tmp_path)  # none has made a step
    beats = [heartbeat.Heartbeat(str(tmp_path / f"heartbeat-{rank}")) for rank in range(2)]
    beats[0].beat(1)
    assert not supervisor._is_still(tmp_path)
    supervisor.still_s = 0.05
    time.sleep(0.06)
    beats[1].beat(1)  # one of them moves
    assert not supervisor._is_still(tmp_path)
    time.sleep(0.06)
    beats[1].beat(1, patience_s=100)
    assert not supervisor._is_still(tmp_path)
    time.sleep(0.06)
    assert not supervisor._is_still(tmp_path)
    beats[1].beat(2)
    assert not supervisor._is_still(tmp_path)
    time.sleep(0.06)
    assert supervisor._is_still(tmp_path)


def test_a_rank_that_aborts_after_all_have_left_is_no_failure(tmp_path):
    """Rank 0 ends with 75 only after every rank has left, with a checkpoint; any other code is a failure."""
    assert find({0: 75, 1: -signal.SIGABRT, 2: 75}, tmp_path, tmp_path, []) is None
    for codes in ({0: 0, 1: -signal.SIGABRT}, {0: 75, 1: -signal.SIGKILL}, {0: -signal.SIGABRT, 1: 75}):
        assert find(codes, tmp_path, tmp_path, []) is not None
