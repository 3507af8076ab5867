"""The meeting of real ranks: one that does not come, one that can't connect, and clocks that are off."""

import gc
import os
import socket
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from support.faults import free_port
from support.messages import refuses
from support.ranks import run_ranks, stop

from trainer.errors import ConfigError
from trainer.process.environment import Place
from trainer.tools.doctor.finding import ERROR, OK, WARNING, Finding
from trainer.tools.doctor.ranks import Meeting, clocks, meet, skew


def own(place: Place) -> list[Finding]:
    return [Finding("machine", "one"), Finding("open files", str(100 + place.rank), data=[place.rank])]


def all_come(place: Place):
    meeting, rows, about = meet(place, own(place), 20.0, Path())
    code = meeting.agree("code", 1 if place.rank == 0 else None)
    meeting.leave()
    return rows, about, code, dist.is_initialized()


def test_rank_0_gets_what_each_rank_has_found():
    first, *others = run_ranks(3, all_come)
    rows, about, code, left = first
    assert rows == {rank: own(Place(rank)) for rank in range(3)}
    assert [finding.subject for finding in about] == ["gloo between ranks", "clocks", "folder of the run"]
    assert {finding.level for finding in about} == {OK} and about[0].value.startswith("3 connected and summed")
    assert code == 1 and not left
    assert others == [({}, [], 1, False)] * 2  # the exit code is that of rank 0


def one_is_elsewhere(place: Place) -> list[Finding]:
    folder = Path("elsewhere" if place.rank == 1 else ".")
    folder.mkdir(exist_ok=True)
    return meet(place, own(place), 20.0, folder)[2]


def test_a_folder_that_is_not_shared(tmp_path):
    found = run_ranks(3, one_is_elsewhere)[0][-1]
    assert (found.subject, found.level) == ("folder of the run", WARNING)
    assert found.value == "rank 1 can't see a file that rank 0 wrote"
    assert sorted(os.listdir()) == ["elsewhere"] and os.listdir("elsewhere") == []


def one_stays_away(place: Place):
    if place.rank == 1:
        return None
    meeting, rows, about = meet(place, own(place), 1.0, Path())
    meeting.agree("code", 1)
    return sorted(rows), about


def test_a_rank_that_does_not_come_has_a_name():
    first, _, third = run_ranks(3, one_stays_away)
    missing = Finding(
        "ranks", "2 of 3 arrived within 1 s; rank 1 did not", ERROR, "a run would wait for them", "see their own output"
    )
    assert first == ([0, 2], [missing]) and third == ([], [])


def rank_0_stays_away(place: Place) -> str:
    if place.rank == 0:
        return ""
    with pytest.raises(ConfigError) as error:
        meet(place, own(place), 0.3, Path())
    return str(error.value)


def test_without_rank_0_the_others_say_so():
    assert run_ranks(2, rank_0_stays_away)[1] == "rank 0: did not answer in 0.6 s; see its own output"


def one_has_a_wrong_interface(place: Place) -> list[Finding]:
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    if place.rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    try:
        return meet(place, own(place), 1.5, Path())[2]
    finally:
        os.environ["GLOO_SOCKET_IFNAME"] = before or "lo"


def test_a_rank_that_can_not_connect_has_a_name_and_its_reason():
    try:
        ((found, *_), _) = run_ranks(2, one_has_a_wrong_interface)
    finally:
        stop()  # torch counts the groups of a process, also one that failed, and other ranks count less
    assert (found.subject, found.level) == ("gloo between ranks", ERROR)
    assert "failed; rank 0: " in found.value and "\n" not in found.line() and "GLOO_SOCKET_IFNAME" in found.way_out


def skewed(place: Place) -> list[tuple[int, float, float]]:
    """Clocks that are 5 s a rank ahead, of which all but rank 0's are read late once."""
    late = iter([0.2])
    meeting = Meeting(place, 20.0)
    limit = timedelta(seconds=20)
    dist.init_process_group("gloo", store=meeting.store, rank=place.rank, world_size=place.world, timeout=limit)

    def now() -> float:
        if place.rank:
            time.sleep(next(late, 0.0))
        return time.time() + 5.0 * place.rank

    return skew(place.rank, [0, 1, 2], now)


def test_the_difference_of_clocks_is_that_of_the_fastest_round_trip():
    first, *others = run_ranks(3, skewed)
    assert others == [[], []] and [rank for rank, _, _ in first] == [1, 2]
    for rank, ahead, error in first:
        assert abs(ahead - 5.0 * rank) <= error < 0.1


def test_clocks_that_are_off_are_named():
    (fine,) = clocks([(8, 0.0004, 0.0001), (16, -0.002, 0.0001)])
    assert fine.level == OK and fine.value == "within 2 ms of rank 0's, to 0.1 ms"
    (off,) = clocks([(8, 0.001, 0.0001), (16, -3.0, 0.0001)])
    assert off.level == WARNING and off.value == "rank 16's is -3.000 s off rank 0's, to 0.1 ms" and off.data == -3.0
    assert [finding.level for finding in clocks([(8, 2.0, 3.0)])] == [OK]  # not known so exactly


def test_a_rank_0_that_ends_too_soon_is_named(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    serving = Meeting(Place(0, 2, 0, 2), 5.0)
    other = Meeting(Place(1, 2, 1, 2), 5.0)
    del serving
    gc.collect()
    with refuses("rank 0", "gone"):
        for _ in range(100):  # the first messages may still leave
            other.publish("key", 1)
            time.sleep(0.05)
    other.leave()


def test_without_an_address_or_an_answer_the_line_says_what_to_look_at(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with refuses("MASTER_ADDR= MASTER_PORT=", "2"):
        Meeting(Place(1, 2, 1, 2), 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(ConfigError, match=r"rank 1 can't connect: .*; see whether rank 0 runs") as error:
        Meeting(Place(1, 2, 1, 2), 0.2)
    assert "\n" not in str(error.value)
    with closing(socket.create_server(("127.0.0.1", port))), pytest.raises(ConfigError, match="rank 0 can't listen"):
        Meeting(Place(0, 2, 0, 2), 0.2)
