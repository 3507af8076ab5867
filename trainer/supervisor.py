"""Starts the ranks of one node, and again where one fails and that can help. No torch here."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.errors import EXIT_CODES
from trainer.heartbeat import Beat, read
from trainer.launch import STOPPED, cores
from trainer.signals import heeded, hold_usr1, show_cursor

GAVE_UP = 70  # exit code: the same failure at the same step, again and again (sysexits' EX_SOFTWARE)
HANGS = 124  # exit code: no rank has moved for too long (as of `timeout`)
SAME = 3  # failures alike in a row of attempts, until the run is given up
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Failure:
    """What ended an attempt: of the rank that failed first."""

    rank: int
    text: str  # for the user
    code: int  # of the run
    reported: bool  # by the rank itself, as an error of Python's


class Restarts:
    """Whether a run is started again: so many times in a row without a step that is further than any before."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.furthest = limit, 0, -1
        self.alike: Counter[tuple[int, str, int]] = Counter()

    def decide(self, failure: Failure, beat: Beat | None) -> tuple[int, str]:
        """The exit code, 0 to start again, and what the user is told of it. `beat`: the last of the rank that failed;
        None where it came to no step."""
        began, step, _ = beat or (0, 0, 0)
        mistake = failure.reported and step == began and self.furthest < 0  # there from the beginning
        if failure.code in EXIT_CODES.values() or mistake or not self.limit:
            return failure.code, ""
        if beat and step > self.furthest:
            self.furthest, self.used = step, 0
        kind = (failure.rank, failure.text.rstrip().rpartition("\n")[2], step)
        self.alike[kind] += beat is not None
        if self.alike[kind] == SAME:
            return GAVE_UP, f"echelon: the same {SAME} times after step {step}: given up"
        if self.used == self.limit:
            return (
                failure.code,
                f"echelon: {self.limit} restarts came no further than step {max(0, self.furthest)}: given up",
            )
        self.used += 1
        where = f"after step {step}" if beat else "before its first step"
        return 0, f"echelon: failed {where}; restart {self.used} of {self.limit}"

    @property
    def pause_s(self) -> float:
        return min(LONGEST_PAUSE_S, 2.0 ** (self.used - 1) - 1)


class Supervisor:
    """Runs `python -m trainer.main ARGUMENTS` once a rank on this node.

    Ranks meet in a file of a private folder, anew in each attempt, so no port is opened but gloo's on loopback. Each is
    in a session of its own and is killed with this process. Signals to stop are passed on; when a rank fails, the
    others get 5 s to end. What happened is told to the user, and appended to events.jsonl in the folder of logs.

    Args:
        arguments: For an attempt; called with whether one before has made a step.
        logs: The folder for what the ranks print.
        further: How to go on, for where no rank has reported an error.
        restarts: See `Restarts`.
        still_s: Seconds without a step of any rank, after which all are killed, and their stacks are in the logs.
    """

    def __init__(
        self,
        arguments: Callable[[bool], list[str]],
        devices: int,
        logs: Path,
        further: Callable[[], str],
        restarts: int,
        still_s: float,
    ) -> None:
        self.arguments, self.devices, self.logs, self.further, self.still_s = arguments, devices, logs, further, still_s
        self.restarts = Restarts(restarts)
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.passed: list[int] = []
        self.moved = False  # whether an attempt has come a step further, so has left what it did not go on from
        self.last = 0.0, 0.0  # the time of the newest heartbeat, and when it was seen to be that
        logs.mkdir(parents=True, exist_ok=True)

    def run(self) -> int:
        """The run's exit code."""
        before = {number: signal.signal(number, self._pass_on) for number in heeded()}
        hold_usr1(False)
        try:
            for attempt in itertools.count():
                code = self._attempt(attempt)
                if code is not None:
                    return code
                self._pause(self.restarts.pause_s)
            raise AssertionError("unreachable")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _attempt(self, attempt: int) -> int | None:
        """The run's exit code; None to start it again."""
        if self.passed:
            print(f"echelon: stopped while nothing ran{self.further()}", file=sys.stderr, flush=True)
            return 128 + self.passed[0]
        with tempfile.TemporaryDirectory(prefix="echelon-") as folder:
            private = Path(folder)
            try:
                arguments = self.arguments(self.moved)
                for rank in range(self.devices):
                    self.ranks.append(self._start(arguments, rank, attempt, private))
                if self.passed:  # meanwhile: it may have reached nobody
                    self._send(signal.SIGTERM)
                codes = self._wait(private)
            finally:
                for rank in self.ranks:
                    rank.kill()
                    rank.wait()
                self.ranks = []
            failure = find(codes, private, self.logs, self.passed)
            if failure is None:
                return max(codes.values())
            beat = read(private / f"heartbeat-{failure.rank}")
        self.moved |= beat is not None and beat.step > beat.began
        code, decision = (failure.code, "") if self.passed else self.restarts.decide(failure, beat)
        self._note(attempt=attempt, rank=failure.rank, step=beat and beat[1], failed=failure.text, code=code)
        show_cursor()
        text = failure.text.rstrip() + ("" if failure.reported or not code else self.further())
        print(*filter(None, (text, decision)), sep="\n", file=sys.stderr, flush=True)
        return code or None

    def _start(self, arguments: list[str], rank: int, attempt: int, private: Path) -> "subprocess.Popen[bytes]":
        env = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.devices),
            "LOCAL_WORLD_SIZE": str(self.devices),
            "ECHELON_PARENT": str(os.getpid()),
            "ECHELON_STORE": str(private / "store"),
            "ECHELON_ATTEMPT": str(attempt),
            "ECHELON_HEARTBEAT": str(private / f"heartbeat-{rank}"),
            "ECHELON_ERROR_FILE": str(private / f"error-{rank}.json"),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // self.devices))),
        }
        command = [sys.executable, "-m", "trainer.main", *arguments]
        if rank == 0:
            return subprocess.Popen(command, env=env, start_new_session=True)
        with open(self.logs / f"rank{rank}.log", "ab") as log:
            return subprocess.Popen(command, env=env, start_new_session=True, stdout=log, stderr=log)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self.passed.append(number)
        self._send(number)

    def _send(self, number: int) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    def _wait(self, private: Path) -> dict[int, int]:
        """Exit codes of the ranks that ended by themselves: once one has failed, the others have 5 s, and while rank 0
        completes a checkpoint they have longer; none where no rank moves."""
        codes: dict[int, int] = {}
        deadline = float("inf")
        while len(codes) < self.devices and time.monotonic() < deadline:
            time.sleep(0.05)
            codes = {i: rank.returncode for i, rank in enumerate(self.ranks) if rank.poll() is not None}
            if set(codes.values()) <= {0, STOPPED}:
                if not codes and self._is_still(private):
                    return {}
            elif deadline == float("inf") or (0 not in codes and (beat := read(private / "heartbeat-0")) and beat.busy):
                deadline = time.monotonic() + 5
        return codes

    def _is_still(self, private: Path) -> bool:
        """Whether no rank has moved for too long; their stacks are in their logs then."""
        newest = max((path.stat().st_mtime for path in private.glob("heartbeat-*")), default=0.0)
        if newest != self.last[0]:
            self.last = newest, time.monotonic()
        if not newest or time.monotonic() - self.last[1] < self.still_s or time.time() < newest:
            return False
        self._send(signal.SIGUSR2)
        time.sleep(1)
        return True

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.passed:
            time.sleep(0.05)

    def _note(self, **event: Any) -> None:
        with open(self.logs / "events.jsonl", "a") as file:
            file.write(json.dumps({"time": round(time.time(), 3), **event}) + "\n")


def find(codes: Mapping[int, int], private: Path, logs: Path, passed: list[int]) -> Failure | None:
    """What failed first; None where nothing did."""
    if not codes:
        return Failure(0, f"echelon: no rank has moved for too long; the stacks of all are in {logs}", HANGS, False)
    failed = {rank: code for rank, code in codes.items() if code not in (0, STOPPED)}
    left = codes.get(0) == STOPPED and set(failed.values()) == {-signal.SIGABRT}
    if not failed or left:  # all with a checkpoint; torch has aborted a rank on its way out
        return None
    reports: dict[int, dict[str, Any]] = {}
    for rank in failed:
        with contextlib.suppress(OSError, ValueError):
            reports[rank] = json.loads((private / f"error-{rank}.json").read_text())
    # Killed from outside or by its own fault; not an abort, which may be what a peer's failure has led to.
    silent = [rank for rank, code in failed.items() if rank not in reports and code != -signal.SIGABRT]
    if passed and not reports:
        name = signal.Signals(passed[0]).name
        return Failure(min(failed), f"echelon: {name}: ended without a checkpoint", 128 + passed[0], False)
    if silent or not reports:
        rank, code = next((rank, failed[rank]) for rank in silent or failed)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        text = f"echelon: rank {rank} {how}; its log: {logs}/rank{rank}.log"
        return Failure(rank, text, 128 - code if code < 0 else code, False)
    rank = min(reports, key=lambda rank: reports[rank]["time"])
    text, code = reports[rank]["text"], reports[rank]["code"]
    text = text if text.startswith("echelon: ") else f"echelon: rank {rank} failed first:\n{text}"
    return Failure(rank, text, code, True)
