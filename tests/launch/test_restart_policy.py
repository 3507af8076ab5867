"""When a run whose rank failed is started again, and when it is given up."""

from trainer.errors import GAVE_UP, UnavailableError, exit_code
from trainer.launch.failure import Failure
from trainer.launch.restart_policy import RestartPolicy
from trainer.process.heartbeat import Beat

KILLED = Failure(1, "echelon: rank 1 was killed by SIGKILL; its log: x", 137, False)
RAISED = Failure(1, "Traceback\nRuntimeError: x", 1, True)


def test_restarts_are_used_up_by_what_gets_no_further_and_come_back_with_a_step():
    restarts = RestartPolicy(2)
    failures = [Failure(0, f"echelon: {letter}", 137, False) for letter in "abcdefghi"]  # no two alike
    assert [restarts.decide(failure, Beat(0, 5, 0))[0] for failure in failures[:3]] == [0, 0, 137]
    restarts = RestartPolicy(2)
    assert [restarts.decide(failure, Beat(0, step, 0))[0] for step, failure in enumerate(failures)] == [0] * 9
    code, said = RestartPolicy(0).decide(KILLED, Beat(0, 5, 0))
    assert code == 137 and said == ""


def test_what_another_try_would_meet_again_is_not_tried():
    for code in (70, 71, 78):
        assert RestartPolicy(3).decide(Failure(0, "echelon: x", code, True), Beat(0, 5, 0))[0] == code
    assert RestartPolicy(3).decide(RAISED, Beat(0, 0, 0)) == (1, "")  # not a step was made
    assert RestartPolicy(3).decide(KILLED, Beat(0, 0, 0))[0] == 0  # but a kill may have come from anywhere
    assert RestartPolicy(3).decide(RAISED, None) == (1, "")
    away = Failure(0, "echelon: x", exit_code(UnavailableError("x")), True)
    assert RestartPolicy(3).decide(away, Beat(0, 5, 0))[0] == 0 == RestartPolicy(3).decide(away, Beat(0, 0, 0))[0]
    restarts = RestartPolicy(9)
    assert [restarts.decide(RAISED, Beat(4, 7, 0))[0] for _ in range(3)] == [0, 0, GAVE_UP]


def test_what_was_away_may_be_back_after_a_while():
    """Also before the first step; for as long as any failure, and with time between."""
    restarts = RestartPolicy(3)
    for beat in (Beat(0, 0, 0), None, None):
        assert restarts.decide(Failure(0, "echelon: a.tar: away", 69, True), beat)[0] == 0 and restarts.pause_s == 10
    assert restarts.decide(Failure(0, "echelon: a.tar: away", 69, True), None)[0] == 69


def test_the_same_failure_is_told_by_another_rank_each_time():
    """What differs between ranks and attempts is no part of it: numbers of ranks and processes, addresses, ports."""
    for text in (
        "Traceback {0}\nechelon: out of memory; try a smaller micro_batch\n",
        "echelon: rank {0} was killed by SIGKILL; its log: runs/r/logs/rank{0}.log",
        "RuntimeError: <Batch at 0x7f{1}0> of pid 41{0}: Connection closed by peer [127.0.0.1]:2{0}731",
    ):
        restarts = RestartPolicy(3)
        failures = [Failure(rank, text.format(rank, "abc"[rank]), 137, True) for rank in (0, 1, 2)]
        assert [restarts.decide(failure, Beat(4, 7, 0))[0] for failure in failures] == [0, 0, GAVE_UP]
    restarts = RestartPolicy(3)
    others = [Failure(1, "OSError: [Errno 5] x", 1, True), Failure(1, "echelon: rank 1 ended with code 7", 7, False)]
    others += [Failure(1, "echelon: rank 1 ended with code 8", 8, False)]
    assert [restarts.decide(failure, Beat(4, 7, 0))[0] for failure in others] == [0, 0, 0]


def test_what_never_came_to_a_step_is_no_loop():
    """A node that is short of something when ranks start may have it the next time."""
    restarts = RestartPolicy(3)
    said = [restarts.decide(KILLED, None) for _ in range(4)]
    assert [code for code, _ in said] == [0, 0, 0, 137]
    assert said[0][1] == "echelon: failed before its first step; restart 1 of 3"
    assert said[3][1] == "echelon: 3 restarts came no further than step 0: given up"


def test_pauses_grow():
    restarts, pauses = RestartPolicy(9), []
    for n in range(8):
        restarts.decide(Failure(0, "x" * n, 137, False), Beat(0, 5, 0))
        pauses.append(restarts.pause_s)
    assert pauses == [0, 1, 3, 7, 15, 30, 30, 30]
