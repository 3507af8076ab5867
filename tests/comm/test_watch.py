"""Every collective is shown once, with the bytes of nccl-tests, and torch.distributed is as before afterwards."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from trainer.comm.bucket import Bucket
from trainer.comm.ranks import Ranks, share
from trainer.comm.reduce import AllReduce, Background, all_gather, reduce_scatter
from trainer.comm.watch import PLACES, listen, watched
from trainer.process.environment import Place


def functions() -> list[Any]:
    return [getattr(owner, name, None) for name, owners in PLACES.items() for owner in owners]


def collectives(place: Place) -> list[tuple[str, int, int, bool, bool]]:
    ranks = Ranks(place, "cpu", "gloo", 60)
    group, before, found = ranks.new_group(), functions(), []
    reduce, bucket = AllReduce(group), Bucket.of([torch.zeros(6)], 0)
    flat, rows = torch.full((6,), float(place.rank + 1)), torch.zeros(place.world * 6)
    with watched(found.append):
        dist.all_reduce(flat, group=group)
        all_gather(rows, flat, group)
        reduce_scatter(flat, rows, group)
        dist.broadcast(flat, 0, group)
        share([flat, rows], group)
        reduce.gather(flat)
        reduce.swap(rows.view(place.world, 6))
        dist.all_gather(list(rows.view(place.world, 6)), tensor=flat, group=group)
        work = dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        work.wait()
        right, left = (place.rank + 1) % place.world, (place.rank - 1) % place.world
        ops = [dist.P2POp(dist.isend, flat, right, group), dist.P2POp(dist.irecv, rows[:6], left, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        background = Background(torch.device("cpu"))
        background.submit(reduce, flat, bucket).wait()
        dist.all_reduce(torch.zeros(2))
    assert functions() == before
    dist.all_reduce(flat, group=group)
    assert len(found) == 12
    assert [call.bucket for call in found] == [None] * 10 + [bucket, None]
    assert [call.group for call in found] == [group] * 11 + [dist.group.WORLD]
    assert all(call.arrived() for call in found)
    ranks.close()
    return [(call.collective, call.bytes, call.group.size(), call.waits, call.seconds() > 0) for call in found]


def test_every_collective_is_shown_once_with_its_bytes() -> None:
    for found in run_ranks(3, collectives):
        assert [call[:2] for call in found] == [
            ("all_reduce", 24), ("all_gather", 72), ("reduce_scatter", 72), ("broadcast", 24), ("broadcast", 96),
            ("all_gather", 72), ("all_to_all", 72), ("all_gather", 72), ("all_reduce", 24), ("send", 24),
            ("all_reduce", 24), ("all_reduce", 8),
        ]  # fmt: skip
        assert {call[2] for call in found} == {3}
        assert [waits for *_, waits, _ in found] == [True] * 8 + [False] * 2 + [True] * 2
        assert all(timed for *_, waits, timed in found if waits)


def test_a_call_with_a_group_of_others_is_not_shown() -> None:
    found: list[Any] = []
    with watched(found.append), pytest.warns(UserWarning, match="does not belong to the given group"):
        dist.all_reduce(torch.zeros(2), group=dist.GroupMember.NON_GROUP_MEMBER)
    assert not found


def failing(place: Place) -> tuple[int, bool]:
    """A call that raises is not shown, and the next one is."""
    ranks, found = Ranks(place, "cpu", "gloo", 60), []
    with watched(found.append):
        with pytest.raises((TypeError, AttributeError, ValueError, RuntimeError)):
            dist.all_reduce(torch.zeros(2, dtype=torch.complex64), op=dist.ReduceOp.MAX)
        done = threading.Thread(target=dist.all_reduce, args=(torch.zeros(2),))
        done.start()
        done.join()
    ranks.close()
    return len(found), found[0].bytes == 8


def test_a_failed_call_is_not_shown() -> None:
    assert run_ranks(2, failing) == [(1, True)] * 2


def named(word: str, names: list[str]) -> Callable[..., Any]:
    """Make a listener to broadcasts."""

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return (lambda *args: names.append(word) or function(*args)) if name == "broadcast" else function

    return wrap


def broadcast(names: list[str]) -> list[str]:
    """Return which listeners hear of a broadcast, the outermost first."""
    names.clear()
    with pytest.raises(ValueError, match="process group"):  # there is none
        dist.broadcast(torch.zeros(1), 0)
    return list(names)


def test_listeners_come_and_go_in_any_order() -> None:
    before, names = functions(), list[str]()
    one, other = named("one", names), named("other", names)
    first, second, third = ExitStack(), ExitStack(), ExitStack()
    listen(one, first)
    assert broadcast(names) == ["one"]
    changed = [now for now, was in zip(functions(), before, strict=True) if now is not was]
    assert changed == [dist.broadcast, dist.distributed_c10d.broadcast]
    listen(other, second)
    listen(one, third)
    assert broadcast(names) == ["other", "one"]
    first.close()
    assert sorted(broadcast(names)) == ["one", "other"]
    third.close()
    assert broadcast(names) == ["other"]
    second.close()
    assert functions() == before


def test_one_function_stays_one_in_all_its_places() -> None:
    """torch compares the operation of a P2POp with its own functions."""
    with watched(lambda call: None):
        assert dist.isend is dist.distributed_c10d.isend is not None


def test_functions_that_a_version_of_torch_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "all_gather_single", raising=False)
    with watched(lambda call: None):
        assert not hasattr(dist, "all_gather_single")
    assert not hasattr(dist, "all_gather_single")
