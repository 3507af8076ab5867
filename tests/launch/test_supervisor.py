"""What the supervisor sees of ranks that do not move or do not end. Of real ranks: tests/faults."""

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from trainer.checkpoint.interval import noted
from trainer.errors import HUNG, STOPPED
from trainer.launch.failure import Failure, find_failure
from trainer.launch.pool import Pool
from trainer.launch.supervisor import Supervisor
from trainer.process import heartbeat
from trainer.process.cgroup import oom_kills
from trainer.process.environment import Place


class Clock:
    """In place of the module `time`: one that a sleep moves on."""

    def __init__(self) -> None:
        self.now, self.at = 0.0, Mock()  # at: called with each time

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.at(self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("launch.supervisor", "launch.pool", "process.heartbeat"):
        monkeypatch.setattr(f"trainer.{module}.time", clock)
    return clock


def pool(clock: Clock, ranks: dict[int, Any]) -> Pool:
    made = Pool(Place(), Path(), Mock(), clock.sleep)
    made.ranks = ranks
    return made


def test_ranks_that_do_not_move_are_seen(tmp_path, clock):
    supervisor = Supervisor(lambda moved: "", [], Place(), tmp_path / "logs", str, 3, still_s=0.05, start_s=0.2)
    assert not supervisor._is_still(tmp_path)
    clock.sleep(0.1)
    assert not supervisor._is_still(tmp_path)  # none has made its plan, which may take longer
    clock.sleep(0.16)
    assert supervisor._is_still(tmp_path)
    supervisor.still_s = 50
    beats = [heartbeat.Heartbeat(str(tmp_path / f"heartbeat-{rank}")) for rank in range(2)]
    beats[0].beat(1)
    assert not supervisor._is_still(tmp_path)
    supervisor.still_s = 0.05
    clock.sleep(0.06)
    beats[1].beat(1)  # one of them moves
    assert not supervisor._is_still(tmp_path)
    clock.sleep(0.06)
    beats[1].beat(1, patience_s=100)
    assert not supervisor._is_still(tmp_path)
    clock.sleep(0.06)
    assert not supervisor._is_still(tmp_path)
    beats[1].beat(2)
    assert not supervisor._is_still(tmp_path)
    for path in tmp_path.glob("heartbeat-*"):
        os.utime(path, (2e9, 2e9))  # what the wall clock says by now may be another time
    clock.sleep(0.06)
    assert supervisor._is_still(tmp_path)


def test_a_warning_of_a_batch_system_reaches_ranks_as_sigterm(tmp_path):
    """At SIGUSR2 they would write their stacks and go on."""
    supervisor = Supervisor(lambda moved: "", [], Place(), tmp_path / "logs", str, 3, still_s=1, start_s=1)
    supervisor.pool = pool(Clock(), {0: (rank := Mock())})
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        supervisor._pass_on(number)
    assert [call.args[0] for call in rank.send_signal.call_args_list] == [signal.SIGUSR1] + [signal.SIGTERM] * 2


def test_ranks_whose_folder_a_cleanup_of_tmpdir_has_removed_are_still_seen(tmp_path, clock):
    """A signal lets them write a checkpoint, and a hang is noticed: neither passes for a run before its first step."""
    supervisor = Supervisor(lambda moved: "", [], Place(), tmp_path / "logs", str, 3, still_s=40, start_s=60)
    private = tmp_path / "private"
    private.mkdir()
    (beat := heartbeat.Heartbeat(str(private / "heartbeat-0"))).beat(7)
    assert not supervisor._is_still(private)
    shutil.rmtree(private)
    for _ in range(9):  # of 270 s, more than start_s and still_s
        clock.sleep(30)
        beat.beat(8)
        assert not supervisor._is_still(private)
    supervisor.pool = pool(clock, {0: Mock(**{"poll.side_effect": [None, None, STOPPED, STOPPED]})})
    supervisor._pass_on(signal.SIGTERM)
    assert supervisor._wait(supervisor.pool, private) == {0: STOPPED}
    clock.sleep(0.5)
    for _ in range(41):
        clock.sleep(1)
        still = supervisor._is_still(private)
    assert still


def test_time_in_which_all_are_suspended_does_not_count(tmp_path, clock):
    """As by `scontrol suspend`: the ranks have as long again when the supervisor wakes."""
    supervisor = Supervisor(lambda moved: "", [], Place(), tmp_path / "logs", str, 3, still_s=40, start_s=60)
    heartbeat.Heartbeat(str(tmp_path / "heartbeat-0")).beat(7)
    seen = []
    for seconds in (1, 1000, *[1] * 41):
        clock.sleep(seconds)
        seen.append(supervisor._is_still(tmp_path))
    assert seen == [False] * 41 + [True] * 2


@pytest.mark.parametrize(("moves_s", "ends_s"), [(0, 45), (200, 225)])
def test_rank_0_may_complete_a_checkpoint_as_long_as_that_moves(tmp_path, clock, moves_s, ends_s):
    """Rank 1 was killed; the disk takes a piece every 30 s until it hangs."""

    def at(now: float) -> None:
        if now // 30 > (now - 0.05) // 30 and now < moves_s:
            beat.beat(busy=True)

    supervisor = Supervisor(lambda moved: "", [], Place(), tmp_path / "logs", str, 3, still_s=40, start_s=60)
    writes, killed = Mock(**{"poll.return_value": None}), Mock(**{"poll.return_value": -9}, returncode=-9)
    beat = heartbeat.Heartbeat(str(tmp_path / "heartbeat-0"))
    beat.beat(7)
    beat.beat(busy=True)
    heartbeat.Heartbeat(str(tmp_path / "heartbeat-1")).beat(7, patience_s=86400)  # what it asked for counts no more
    clock.at = lambda now: (at(now), None if now < 900 else pytest.fail("waits for ever"))
    assert supervisor._wait(pool(clock, {0: writes, 1: killed}), tmp_path) == {1: -9}
    writes.send_signal.assert_called_once_with(signal.SIGUSR2)
    assert ends_s <= clock.now < ends_s + 10


@pytest.mark.parametrize("code", [0, STOPPED])
def test_a_rank_that_does_not_end_when_others_have_is_seen(code, tmp_path, clock):
    """As a thread of the user's may keep it; no collective waits for it any more."""
    clock.at = lambda now: None if now < 900 else pytest.fail("waits for ever")
    supervisor = Supervisor(lambda moved: "", [], Place(), tmp_path / "logs", str, 3, still_s=40, start_s=60)
    hangs, ended = Mock(**{"poll.return_value": None}), Mock(**{"poll.return_value": code}, returncode=code)
    ranks = {0: ended, 1: ended, 2: hangs, 3: hangs}
    for rank in ranks:
        heartbeat.Heartbeat(str(tmp_path / f"heartbeat-{rank}")).beat(7)
    codes = supervisor._wait(pool(clock, ranks), tmp_path)
    assert codes == {0: code, 1: code} and 40 <= clock.now < 50
    hangs.send_signal.assert_called_with(signal.SIGUSR2)
    failure = find_failure(codes, ranks, tmp_path, Path("logs"), [])
    told = "echelon: rank(s) 2, 3 did not end after the others; their stacks are in logs"
    assert failure == Failure(2, told, HUNG, False)


def test_all_ranks_are_killed_before_one_is_waited_for(tmp_path, monkeypatch):
    """One that waits for a network's disk can't be killed until that answers."""
    place, done = Place(0, 3, 0, 3, starts=True), []
    supervisor = Supervisor(lambda moved: "", [], place, tmp_path, str, 3, 40, 60)

    def start(run: int, attempt: int, private: Path, place: Place) -> Mock:
        process = Mock(**{"poll.return_value": -9}, returncode=-9)
        process.kill, process.wait = (lambda name=name: done.append(name) for name in ("kill", "wait"))
        return process

    monkeypatch.setattr(supervisor, "_start", start)
    assert supervisor._attempt(0) is None
    assert done == ["kill"] * 3 + ["wait"] * 3
    assert noted(tmp_path) == 1  # a failure of the machine, for checkpoint.every=auto
    supervisor.policy.limit = 0
    assert supervisor._attempt(1) == 128 + signal.SIGKILL and noted(tmp_path) == 2  # also if it is not restarted


@pytest.mark.parametrize(("step", "grows", "code"), [(0, True, 137), (0, False, None), (1, True, None)])
def test_a_kill_for_want_of_memory_before_the_first_step_is_final(step, grows, code, tmp_path, monkeypatch, capfd):
    """A real process is killed; the kernel's counter is a file of ours. Without its word, anyone may have killed."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    vmstat = tmp_path / "proc" / "vmstat"
    vmstat.write_text("nr_free_pages 7\noom_kill 3\n")
    monkeypatch.setattr("trainer.launch.supervisor.oom_kills", lambda: oom_kills(tmp_path / "proc", tmp_path / "sys"))
    place = Place(0, 2, 0, 2, starts=True)
    supervisor = Supervisor(lambda moved: "", [], place, tmp_path / "logs", str, 3, 40, 60)

    def start(run: int, attempt: int, private: Path, place: Place) -> "subprocess.Popen[bytes]":
        beat = heartbeat.Heartbeat(str(private / f"heartbeat-{place.rank}"))
        beat.beat(0), beat.beat(step)
        process = subprocess.Popen(["sleep", "60"])
        if place.rank:
            process.kill()
            vmstat.write_text(f"nr_free_pages 7\noom_kill {3 + grows}\n")
        return process

    monkeypatch.setattr(supervisor, "_start", start)
    monkeypatch.setattr("trainer.launch.supervisor.PEERS_S", 0.0)
    monkeypatch.setattr("trainer.launch.supervisor.STACKS_S", 0.0)
    assert supervisor._attempt(0) == code
    first, *others = capfd.readouterr().err.splitlines()
    assert first.startswith("echelon: rank 1 was killed by SIGKILL")
    assert ("memory ran out, so the kernel killed it; give fewer trainer.devices" in first) == grows
    assert others == ([] if code else [f"echelon: failed after step {step}; restart 1 of 3"])
