"""Gathers the findings of all ranks over torch's store, so that a rank that can't connect is known by its number.

Then the ranks connect by gloo, as in a run, and compare their clocks.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer import timeouts
from trainer.errors import ConfigError
from trainer.process.environment import Place
from trainer.tools.doctor.finding import ERROR, OK, WARNING, Finding
from trainer.tools.doctor.report import in_words

Rows = dict[int, list[Finding]]
ROUND_TRIPS = 8  # the fastest of them bounds the error of a clock's difference


class Meeting:
    """The ranks of a launcher, any of which may be absent.

    Args:
        limit_s: Seconds that each exchange waits for a rank.
    """

    def __init__(self, place: Place, limit_s: float) -> None:
        self.place, self.limit_s = place, limit_s
        self.store = dist.PrefixStore("doctor", open_store(place, limit_s))

    def publish(self, key: str, value: Any) -> None:
        """Publish a JSON value of this rank under a key. Raises ConfigError if rank 0, the store's host, has ended."""
        try:
            self.store.set(f"{key}/{self.place.rank}", json.dumps(value))
        except RuntimeError as error:
            raise ConfigError(f"rank 0: is gone ({first_line(error)}); see its own output") from None

    def read(self, key: str, rank: int, until: float) -> Any:
        """Return a rank's value; None if it has not arrived by `until`, on the monotonic clock."""
        name = f"{key}/{rank}"
        try:
            self.store.wait([name], timedelta(seconds=max(0.01, until - time.monotonic())))
        except RuntimeError:
            return None
        return json.loads(self.store.get(name))

    def gather(self, key: str, value: Any) -> dict[int, Any] | None:
        """Return on rank 0 the values that arrive in time, by rank; None on other ranks."""
        self.publish(key, value)
        if self.place.rank:
            return None
        until = time.monotonic() + self.limit_s
        heard = {rank: self.read(key, rank, until) for rank in range(self.place.world)}
        return {rank: value for rank, value in heard.items() if value is not None}

    def agree(self, key: str, value: Any) -> Any:
        """Return rank 0's value on all ranks; None if rank 0 does not answer."""
        if self.place.rank == 0:
            self.publish(key, value)
            return value
        return self.read(key, 0, time.monotonic() + 2 * self.limit_s)

    def leave(self) -> None:
        """Keep rank 0, which hosts the store, until the others have read it."""
        with suppress(ConfigError):
            self.gather("left", True)


def open_store(place: Place, limit_s: float) -> dist.Store:
    timeout = timedelta(seconds=limit_s)
    if place.store:
        return dist.FileStore(place.store, place.world)
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise ConfigError(
            f"MASTER_ADDR={address} MASTER_PORT={port}: {place.world} ranks need an address to meet at; "
            "start them by torchrun or srun, or set both variables to the first machine's"
        )
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun's agent does
    try:
        return dist.TCPStore(
            address, int(port), place.world, serves, timeout, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        raise ConfigError(
            f"MASTER_ADDR={address} MASTER_PORT={port}: rank {place.rank} can't {'listen' if serves else 'connect'}: "
            f"{first_line(error)}; see whether rank 0 runs, and whether the port is open between the machines"
        ) from None


def meet(place: Place, own: Sequence[Finding], limit_s: float, folder: Path) -> tuple[Meeting, Rows, list[Finding]]:
    """Return the meeting and, on rank 0, the findings of each rank that came and those about all ranks.

    Args:
        folder: The folder of the run, which all ranks should share.

    Raises:
        ConfigError: This rank reached no other.
    """
    meeting = Meeting(place, limit_s)
    came = meeting.gather("findings", [place.local_rank, [asdict(finding) for finding in own]])
    plan = None
    if came is not None:
        plan = {"absent": sorted(set(range(place.world)) - came.keys())}
        plan["firsts"] = [rank for rank, (local_rank, _) in came.items() if local_rank == 0]
    if (plan := meeting.agree("plan", plan)) is None:
        raise ConfigError(f"rank 0: did not answer in {2 * limit_s:g} s; see its own output")
    absent = plan["absent"]
    about = [] if absent else [*connect(meeting, plan["firsts"]), *shared(meeting, folder)]
    rows = {rank: [Finding(**finding) for finding in findings] for rank, (_, findings) in (came or {}).items()}
    if absent and came:
        text = f"{len(came)} of {place.world} arrived within {limit_s:g} s; {in_words(absent)} did not"
        about.append(Finding("ranks", text, ERROR, "a run would wait for them", "see their own output"))
    return meeting, rows, about


def shared(meeting: Meeting, folder: Path) -> list[Finding]:
    """Return on rank 0 which ranks can't see a file that rank 0 creates in `folder`."""
    with ExitStack() as kept:
        name = ""
        if meeting.place.rank == 0:
            with suppress(OSError):  # of which the disk has a finding
                name = kept.enter_context(tempfile.NamedTemporaryFile(prefix=".echelon-doctor-", dir=folder)).name
        name = meeting.agree("file", Path(name).name)
        seen = meeting.gather("seen", bool(name) and (folder / name).exists())
    if not seen or not name:
        return []
    blind = [rank for rank, sees in seen.items() if not sees]
    if not blind:
        return [Finding("folder of the run", "shared by all ranks")]
    return [
        Finding(
            "folder of the run", f"{in_words(blind)} can't see a file that rank 0 wrote", WARNING,
            "callbacks with a state of each rank are refused, and a restart elsewhere finds no checkpoint",
            "give all machines the same folder on a shared disk, by --folder and trainer.checkpoint.dir",
        )
    ]  # fmt: skip


def connect(meeting: Meeting, firsts: Sequence[int]) -> list[Finding]:
    """Connect all ranks by gloo, sum a number, and compare clocks. Return the findings on rank 0.

    `firsts` are the first ranks of the machines.
    """
    place, failure, skews = meeting.place, "", list[tuple[int, float, float]]()
    began = time.perf_counter()
    try:
        store = dist.PrefixStore("gloo", meeting.store)
        dist.init_process_group(
            "gloo", store=store, rank=place.rank, world_size=place.world, timeout=timedelta(seconds=meeting.limit_s)
        )
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == place.world
        connected_s = time.perf_counter() - began
        skews = skew(place.rank, firsts)
    except Exception as error:
        connected_s, failure = 0.0, first_line(error)
    failures = meeting.gather("gloo", failure)
    if dist.is_initialized():
        dist.destroy_process_group()
    if failures is None:
        return []
    texts = {rank: failures.get(rank, "no answer") for rank in range(place.world)}
    if failed := {rank: text for rank, text in texts.items() if text}:
        rank, text = next(iter(failed.items()))
        return [
            Finding(
                "gloo between ranks", f"{in_words(list(failed))} failed; rank {rank}: {text}", ERROR,
                "ranks can't agree on a step", "open all ports between the machines, and name the interface: "
                "GLOO_SOCKET_IFNAME=eth0",
            )
        ]  # fmt: skip
    found = [Finding("gloo between ranks", f"{place.world} connected and summed in {connected_s:.3g} s")]
    return [*found, *clocks(skews)]


def skew(rank: int, firsts: Sequence[int], now: Callable[[], float] = time.time) -> list[tuple[int, float, float]]:
    """Return on rank 0, for each machine: its first rank, by how many seconds its clock is ahead, and the error.

    As in NTP (Mills 1985, RFC 958), the remote clock is assumed to be read in the middle of a round trip. The error is
    at most half of its time. The fastest round trip counts.
    """
    found = list[tuple[int, float, float]]()
    for other in firsts:
        if other and rank in (0, other):
            trips = [round_trip(rank, other, now) for _ in range(ROUND_TRIPS)]
            seconds, ahead = min(trips)
            found.append((other, ahead, seconds / 2))
    return found if rank == 0 else []


def round_trip(rank: int, other: int, now: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds of a round trip from rank 0 to `other`, and by how much the clock there is ahead."""
    clock = torch.zeros(1, dtype=torch.float64)
    if rank == other:
        dist.recv(clock, 0)
        dist.send(torch.tensor([now()], dtype=torch.float64), 0)
        return 0.0, 0.0
    sent = now()
    dist.send(clock, other)
    dist.recv(clock, other)
    seconds = now() - sent
    return seconds, clock.item() - (sent + seconds / 2)


def clocks(skews: Sequence[tuple[int, float, float]]) -> Iterator[Finding]:
    if not skews:
        yield Finding("clocks", "one machine, one clock")
        return
    off = [(rank, ahead, error) for rank, ahead, error in skews if abs(ahead) > timeouts.SKEW_S + error]
    for rank, ahead, error in off:
        yield Finding(
            "clocks", f"rank {rank}'s is {ahead:+.3f} s off rank 0's, to {1e3 * error:.2g} ms", WARNING,
            "times in logs and of files mislead", "run chronyd or ntpd on all machines", data=ahead,
        )  # fmt: skip
    if not off:
        worst, error = max((abs(ahead), error) for _, ahead, error in skews)
        yield Finding("clocks", f"within {1e3 * worst:.2g} ms of rank 0's, to {1e3 * error:.2g} ms", OK, data=worst)


def first_line(error: BaseException) -> str:
    """Return an error's message without the stack that torch appends."""
    return (str(error) or type(error).__name__).strip().splitlines()[0][:300]
