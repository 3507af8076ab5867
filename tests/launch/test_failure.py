"""Which rank is named, by how all of them ended, and whether it is a mistake that was there from the beginning."""

import json
from pathlib import Path

import pytest

from trainer.launch.failure import blame_memory, find_failure
from trainer.launch.restart_policy import RestartPolicy
from trainer.process.heartbeat import Beat, Heartbeat

LOST = "Connection closed by peer"


def report(folder: Path, rank: int, text: str) -> None:
    content = {"time": float(rank), "text": text, "code": 1, "in_collective": text == LOST}
    (folder / f"error-{rank}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("codes", "reports", "rank", "said"),
    [
        ({0: 1, 1: -6, 2: 1}, {0: LOST, 2: LOST}, 1, "echelon: rank 1 was killed by SIGABRT; its log: logs/rank1.log"),
        ({0: 1, 1: -6}, {0: "ValueError: x"}, 0, "echelon: rank 0 failed first:\nValueError: x"),
        ({0: -6, 1: -6}, {}, 0, "echelon: all ranks were aborted: a collective timed out; their collectives are in"),
    ],
)
def test_an_abort_is_the_cause_if_the_others_tell_of_collectives_only(codes, reports, rank, said, tmp_path):
    """As a GPU's assertion aborts its rank; NCCL's watchdog aborts all."""
    for each, text in reports.items():
        report(tmp_path, each, text)
    failure = find_failure(codes, range(3), tmp_path, Path("logs"), [])
    assert failure is not None and failure.rank == rank and failure.text.startswith(said)


@pytest.mark.parametrize(
    ("text", "code"),
    [("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ", 0), ("RuntimeError: a bad value", 1)],
)
def test_a_worker_that_is_killed_in_the_first_step_is_no_mistake_of_the_run(text, code, tmp_path):
    report(tmp_path, 0, f"Traceback\n{text}")
    failure = find_failure({0: 1}, range(1), tmp_path, Path("logs"), [])
    assert failure is not None and RestartPolicy(3).decide(failure, Beat(0, 0, 0))[0] == code


def test_a_worker_that_the_kernel_kills_for_want_of_memory_is_named(tmp_path):
    report(tmp_path, 0, "Traceback\nRuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ")
    failure = find_failure({0: 1}, range(1), tmp_path, Path("logs"), [])
    assert failure is not None
    failure = blame_memory(failure)
    assert RestartPolicy(3).decide(failure, Beat(0, 0, 0)) == (1, "")
    assert failure.text.splitlines()[-1].startswith("echelon: a data worker: memory ran out")


@pytest.mark.parametrize(("text", "said"), [(LOST, "SIGTERM: ended without a checkpoint"), ("ValueError: x", "rank 0")])
def test_a_lost_peer_after_a_signal_is_no_failure(text, said, tmp_path):
    """As srun sends SIGTERM to all nodes once a rank of another one was killed."""
    report(tmp_path, 0, text)
    failure = find_failure({0: 1}, range(1), tmp_path, Path("logs"), [15])
    assert failure is not None and said in failure.text and failure.code == (143 if text == LOST else 1)


@pytest.mark.parametrize(
    ("codes", "reported", "passed", "said", "code"),
    [
        ({0: 0, 1: 0}, {}, [], "", 0),
        ({0: 75, 1: 75}, {}, [15], "", 75),
        ({0: 1, 1: 78}, {0: (2.0, "late"), 1: (1.0, "echelon: early")}, [], "echelon: early", 78),
        ({0: 1, 1: 78}, {0: (1.0, "early"), 1: (2.0, "late")}, [], "echelon: rank 0 failed first:\nearly", 1),
        ({0: 1, 1: -9}, {0: (1.0, "reset")}, [], "echelon: rank 1 was killed by SIGKILL; its log: logs/rank1.log", 137),
        ({0: 7, 1: 1}, {1: (1.0, "reset")}, [], "echelon: rank 0 ended with code 7; its log: logs/rank0.log", 7),
        ({0: -6, 1: 1}, {1: (1.0, "early")}, [], "echelon: rank 1 failed first:\nearly", 1),  # NCCL's watchdog aborts
        ({0: -6}, {}, [], "echelon: rank 0 was killed by SIGABRT; its log: logs/rank0.log", 134),
        ({0: 130, 1: -15}, {}, [2, 2], "echelon: SIGINT: ended without a checkpoint", 130),
    ],
)
def test_who_is_told_of(codes, reported, passed, said, code, tmp_path):
    for rank, (when, text) in reported.items():
        report = {"time": when, "text": text, "code": codes[rank], "in_collective": text == "reset"}
        (tmp_path / f"error-{rank}.json").write_text(json.dumps(report))
    failure = find_failure(codes, range(2), tmp_path, Path("logs"), passed)
    assert (failure.text, failure.code) == (said, code) if failure else not said


@pytest.mark.parametrize(
    ("codes", "own", "rank", "told"),
    [
        ({0: 1, 2: 1}, [], 1, "rank(s) 1 did not end and had to be killed: the likely cause; its log: logs/rank1.log"),
        ({0: 1}, [], 1, "rank(s) 1, 2 did not end and had to be killed: the likely cause; its log: logs/rank1.log"),
        ({0: 1, 1: 1, 2: 0}, [], 2, "rank(s) 2 ended with code 0 before the others: the likely cause; its log: logs"),
        ({0: 1, 2: 0}, [], 2, "rank(s) 2 ended with code 0 before the others"),  # and lets rank 1 wait
        ({0: 1, 1: 1, 2: 1}, [], 0, LOST),
        ({0: 1, 1: 1, 2: 1}, [2], 2, "its own"),  # told late: it had a thread to wait for
        ({0: 1, 2: 1}, [2], 2, "its own"),
        ({0: 1, 1: -9}, [], 1, "rank 1 was killed by SIGKILL; its log: logs/rank1.log"),
    ],
)
def test_who_lets_its_peers_fail_is_told_of(codes, own, rank, told, tmp_path):
    for r, code in codes.items():
        text = "its own" if r in own else LOST
        report = {"time": float(r), "text": text, "code": code, "in_collective": text == LOST}
        if code == 1:
            (tmp_path / f"error-{r}.json").write_text(json.dumps(report))
    failure = find_failure(codes, range(3), tmp_path, Path("logs"), [])
    assert failure is not None and failure.rank == rank and told in failure.text.splitlines()[-1]
    assert failure.reported == (failure.text.splitlines()[-1] in (LOST, "its own"))


@pytest.mark.parametrize("patience_s", [0.0, 1800.0])
def test_a_rank_that_let_its_peers_wait_for_long_work_is_told_of_with_the_limit(patience_s, tmp_path):
    for rank in (0, 2):
        report(tmp_path, rank, LOST)
    beats = Heartbeat(str(tmp_path / "heartbeat-1"))
    beats.beat(3, patience_s=patience_s)
    beats.close()
    failure = find_failure({0: 1, 2: 1}, range(3), tmp_path, Path("logs"), [])
    said = "echelon: rank 1 had announced long work, as a compilation is; raise trainer.timeout_s"
    assert failure is not None and (failure.text.splitlines()[-1] == said) == bool(patience_s)


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ({}, "echelon: no rank has moved for too long"),
        ({0: 0}, "echelon: rank(s) 1, 2 did not end after the others"),
        ({0: -9}, "echelon: rank 0 was killed by SIGKILL"),
        ({0: -6, 2: -6}, "echelon: all ranks were aborted: a collective timed out"),
        ({1: 1}, "echelon: rank(s) 0, 2 did not end and had to be killed: the likely cause"),
    ],
)
def test_without_logs_none_are_named(codes, said, tmp_path):
    report(tmp_path, 1, LOST)
    failure = find_failure(codes, range(3), tmp_path, None, [])
    assert failure is not None and failure.text.splitlines()[-1] == said
