"""Writes `comm.jsonl`: bytes, seconds, algorithm and bus bandwidth of each collective and of each bucket."""

import json
from collections import deque
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from trainer.annotated import PositiveInt
from trainer.callback import Callback, Role
from trainer.comm.bandwidth import BUS_FACTORS, bandwidths, level_of
from trainer.comm.bucket import Bucket
from trainer.comm.ranks import Ranks
from trainer.comm.reduce import Reduce
from trainer.comm.watch import Call, watched
from trainer.files import Appended
from trainer.log import log


class Kind(NamedTuple):
    """Calls that agree in these fields are summed up in one line of the file."""

    collective: str
    bucket: int | None
    level: str
    ranks: int  # in the group
    timed: bool


class CommMonitor(Callback):
    """Measures the collectives of a run as nccl-tests defines them, without waiting for the device.

    DeepSpeed's CommsLogger synchronises the device after each operation, so nothing overlaps while it measures. Here,
    CUDA events are recorded around a collective, and read once they have passed. On a CPU, a clock times the blocking
    call, in the thread of the Reduce chain.

    DDP's own reducer calls its collectives from C++, where torch exposes none of them. This callback wraps the
    reduction, so the Reduce chain runs instead, with the same bits.

    Args:
        ranks: With up to this many ranks, the file has every rank's lines; with more, only rank 0's.
    """

    role = Role.MEASURE
    communicates = True

    def __init__(self, ranks: PositiveInt = 32) -> None:
        self.most = ranks
        self.calls: deque[Call] = deque()  # of any thread, in the order of their ends
        self.sums: dict[Kind, tuple[int, int, float]] = {}  # calls, bytes and seconds since the last logged step
        self.file: Appended | None = None
        self.saved: dict[str, Any] = {"bytes": 0, "kept": ""}
        self.untimed: set[str] = set()  # collectives that the log has named

    def wrap_reduce(self, trainer, reduce: Reduce) -> Reduce:
        def chain(flat: Tensor, bucket: Bucket) -> Tensor:
            return reduce(flat, bucket)

        return chain  # no AllReduce: a strategy may take a bare one for no chain

    def on_fit_start(self, trainer) -> None:
        self.groups = Groups(trainer.ranks)
        buckets = enumerate(trainer.buckets)
        self.numbers = {frozenset(id(trainer.parameters[i]) for i in each): n for n, each in buckets}
        self.step = trainer.step
        if trainer.rank == 0:
            self.file = Appended(trainer.run_dir / "comm.jsonl")
            self.file.go_on(self.saved)
        trainer.undo.enter_context(watched(self._take))

    def _take(self, call: Call) -> None:
        if call.group.group_name not in self.groups.own:
            self.calls.append(call)

    def on_step_end(self, trainer) -> None:
        while self.calls and self.calls[0].arrived():
            self._add(self.calls.popleft())
        if not trainer.metrics:
            return
        own, steps = self._lines(trainer.step), trainer.step - self.step
        self.sums, self.step = {}, trainer.step
        lines = trainer.ranks.gather(own) if trainer.world <= self.most else [own]
        if self.file:
            rows = [{"step": trainer.step, "rank": rank, **line} for rank, each in enumerate(lines) for line in each]
            self.file.write("".join(f"{json.dumps(row)}\n" for row in rows).encode())
        trainer.metrics |= totals(lines, steps)

    def _add(self, call: Call) -> None:
        level, ranks = self.groups.describe(call.group)
        kind = Kind(call.collective, self._number(call.bucket), level, ranks, call.waits)
        count, size, seconds = self.sums.get(kind, (0, 0, 0.0))
        self.sums[kind] = count + 1, size + call.bytes, seconds + (call.seconds() if call.waits else 0.0)

    def _number(self, bucket: Bucket | None) -> int | None:
        """Return a bucket's number: the strategy's buckets come first, then others in the order of their reduction."""
        if bucket is None or not bucket.pieces:
            return None
        return self.numbers.setdefault(frozenset(id(piece.param) for piece in bucket.pieces), len(self.numbers))

    def _lines(self, step: int) -> list[dict[str, Any]]:
        for name in sorted({kind.collective for kind in self.sums if not kind.timed} - self.untimed):
            self.untimed.add(name)
            log.info("comm_monitor: some calls of %s end elsewhere: comm.jsonl has their bytes, without seconds", name)
        if not self.sums and "" not in self.untimed:
            self.untimed.add("")
            log.info("comm_monitor: saw no collective up to step %d; C++ and compiled graphs make theirs unseen", step)
        return [line(kind, *self.sums[kind]) for kind in sorted(self.sums, key=str)]

    def on_fit_end(self, trainer) -> None:
        if self.file:
            self.file.close()

    def state_dict(self) -> dict[str, Any]:
        return self.file.state_dict() if self.file else self.saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state


class Groups:
    """The levels of this rank's process groups, and which of them only serve agreements of a few numbers."""

    def __init__(self, ranks: Ranks) -> None:
        self.per_node = ranks.place.local_world
        self.own = {group.group_name for group in ranks.own_groups}
        self.known: dict[str, tuple[str, int]] = {}  # by name: a group that is held here could not be destroyed

    def describe(self, group: dist.ProcessGroup) -> tuple[str, int]:
        if group.group_name not in self.known:
            members = dist.get_process_group_ranks(group)
            self.known[group.group_name] = level_of(members, self.per_node), len(members)
        return self.known[group.group_name]


def line(kind: Kind, count: int, size: int, seconds: float) -> dict[str, Any]:
    """Return the means over calls of one kind, and bandwidths in bytes/s."""
    known = kind.timed and seconds > 0
    algbw, busbw = bandwidths(kind.collective, size, seconds, kind.ranks) if known else (None, None)
    shown = {"collective": kind.collective, "bucket": kind.bucket, "level": kind.level, "ranks": kind.ranks}
    means = {
        "bytes": size // count if size % count == 0 else size / count,
        "count": count,
        "seconds": seconds / count if kind.timed else None,
    }
    return {**shown, **means, "algbw": algbw, "busbw": busbw}


def totals(lines: list[list[dict[str, Any]]], steps: int) -> dict[str, float]:
    """Return the metrics of a step, averaged over the ranks of `lines`."""
    each = [one for own in lines for one in own]
    timed = [one for one in each if one["seconds"] is not None]
    seconds = sum(one["count"] * one["seconds"] for one in timed)
    share = len(lines) * steps
    metrics = {"comm/mib_per_step": sent(each) / share / 2**20, "comm/seconds_per_step": seconds / share}
    return metrics | ({"comm/busbw_mib_s": sent(timed) / seconds / 2**20} if seconds else {})


def sent(lines: list[dict[str, Any]]) -> float:
    """Return the bytes that a link carries for these calls, as bus bandwidth counts them."""
    return sum(one["count"] * one["bytes"] * BUS_FACTORS[one["collective"]](one["ranks"]) for one in lines)
