"""Which rank is named, by how all of them ended, and whether it is a mistake that was there from the beginning."""

import json
from pathlib import Path

import pytest

from trainer.launch.failure import find_failure
from trainer.launch.restart_policy import RestartPolicy
from trainer.process.heartbeat import Beat

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


@pytest.mark.parametrize(("text", "said"), [(LOST, "SIGTERM: ended without a checkpoint"), ("ValueError: x", "rank 0")])
def test_a_lost_peer_after_a_signal_is_no_failure(text, said, tmp_path):
    """As srun sends SIGTERM to all nodes once a rank of another one was killed."""
    report(tmp_path, 0, text)
    failure = find_failure({0: 1}, range(1), tmp_path, Path("logs"), [15])
    assert failure is not None and said in failure.text and failure.code == (143 if text == LOST else 1)
