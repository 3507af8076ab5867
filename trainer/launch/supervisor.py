"""Starts the ranks of one node, and again where one fails and that can help. No torch here."""

import contextlib
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.errors import STOPPED
from trainer.files import Appended
from trainer.launch.failure import find
from trainer.launch.flight_recorder import odd_one
from trainer.launch.forkserver import ForkServer, Rank
from trainer.launch.restart_policy import Restarts
from trainer.process.environment import Place, cores
from trainer.process.heartbeat import Beat, last, read
from trainer.process.signals import EARLY, Heard
from trainer.process.stdio import show_cursor


class Supervisor:
    """Has what `python -m trainer.main --resolved FD TYPED` does forked once a rank on this node.

    Ranks meet in a file of a private folder, anew in each attempt, so no port is opened but gloo's on loopback; those
    of several nodes by MASTER_ADDR and MASTER_PORT. Each is in a session of its own and is killed with this process.
    Signals to stop are passed on; when a rank fails, the others get 5 s to end. What happened is told to the user, and
    appended to events.jsonl in the folder of logs.

    Args:
        resolved: The config of an attempt, as YAML; called with whether one before has made a step. It may hold
            secrets, so it is in no file, but in memory at the descriptor FD, which goes with the processes.
        typed: To be shown.
        place: Of the first of them among all ranks.
        logs: The folder for what the ranks print.
        further: How to go on, for where no rank has reported an error.
        restarts: See `Restarts`.
        still_s: Seconds without a step of any rank, after which all are killed, and their stacks are in the logs.
        start_s: That they have more, until the first of them has made its plan.
    """

    def __init__(
        self,
        resolved: Callable[[bool], str],
        typed: list[str],
        place: Place,
        logs: Path,
        further: Callable[[], str],
        restarts: int,
        still_s: float,
        start_s: float,
    ) -> None:
        self.resolved, self.typed, self.place = resolved, typed, place
        self.logs, self.further, self.still_s, self.start_s = logs, further, still_s, start_s
        self.restarts = Restarts(restarts)
        self.server: ForkServer | None = None
        self.ranks: dict[int, Rank] = {}
        self.passed: list[int] = []
        self.moved = False  # whether an attempt has come a step further, so has left what it did not go on from
        self.started, self.began = time.time(), time.monotonic()  # of the attempt
        logs.mkdir(parents=True, exist_ok=True)
        self.events = Appended(logs / "events.jsonl")

    def run(self) -> int:
        """The run's exit code."""
        with Heard(self._pass_on), contextlib.closing(self.events):
            try:
                for attempt in itertools.count():
                    code = self._attempt(attempt)
                    if code is not None:
                        return code
                    self._pause(self.restarts.pause_s)
            finally:
                if self.server:
                    self.server.close()
        raise AssertionError("unreachable")

    def _attempt(self, attempt: int) -> int | None:
        """The run's exit code; None to start it again."""
        memory = os.fdopen(os.memfd_create("config"), "wb", buffering=0)
        with tempfile.TemporaryDirectory(prefix="echelon-") as folder, memory:
            private, self.started, self.began = Path(folder), time.time(), time.monotonic()
            memory.write(self.resolved(self.moved).encode())
            try:
                for local_rank in range(self.place.local_world):
                    self._start(memory.fileno(), local_rank, attempt, private)
                codes = self._wait(private)
            finally:
                for process in self.ranks.values():
                    process.kill()
                for process in self.ranks.values():
                    process.wait()
                ranks, self.ranks = list(self.ranks), {}
            if codes is None:
                name = signal.Signals(self.passed[0]).name if self.passed else "a signal to a rank"
                print(f"echelon: {name}: {EARLY}{self.further()}", file=sys.stderr, flush=True)
                return 130 if name == "SIGINT" else STOPPED
            failure = find(codes, ranks, private, self.logs, self.passed)
            if failure is None:
                return max(codes.values())
            beat = read(private / f"heartbeat-{failure.rank}")
        self.moved |= beat is not None and beat.step > beat.began
        code, decision = (failure.code, "") if self.passed else self.restarts.decide(failure, beat)
        odd = odd_one(self.logs, self.started)
        self._note(attempt=attempt, rank=failure.rank, step=beat and beat[1], failed=failure.text, odd=odd, code=code)
        show_cursor()
        text = failure.text.rstrip() + ("" if failure.reported or not code else self.further())
        print(*filter(None, (text, odd, decision)), sep="\n", file=sys.stderr, flush=True)
        return code or None

    def _start(self, resolved: int, local_rank: int, attempt: int, private: Path) -> None:
        place, rank = self.place, self.place.rank + local_rank
        alone = place.world == place.local_world
        if self.server is None or self.server.dead:
            threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // place.local_world)))
            interface = {"GLOO_SOCKET_IFNAME": "lo"} if alone else {}
            self.server = ForkServer(self.typed, {"OMP_NUM_THREADS": threads, **interface})
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(place.world),
            "LOCAL_WORLD_SIZE": str(place.local_world),
            "ECHELON_STORE": str(private / "store") if alone else "",
            "ECHELON_ATTEMPT": str(attempt),
            "ECHELON_HEARTBEAT": str(private / f"heartbeat-{rank}"),
            "ECHELON_ERROR_FILE": str(private / f"error-{rank}.json"),
        }
        with open(self.logs / f"rank{rank}.log", "ab") as log:
            self.ranks[rank] = self.server.fork(env, resolved, log.fileno() if rank else None)

    def _pass_on(self, number: int) -> None:
        self.passed.append(number)
        self._send(number)

    def _send(self, number: int) -> None:
        for process in list(self.ranks.values()):
            if process.poll() is None:
                process.send_signal(number)

    def _wait(self, private: Path) -> dict[int, int] | None:
        """Exit codes of the ranks that ended by themselves: once one has failed, the others have 5 s, and while rank 0
        completes a checkpoint, and that moves, they have longer; fewer than all, too, where no rank moves. The others'
        stacks are in their logs. None: asked to stop before any has begun."""
        codes: dict[int, int] = {}
        deadline = float("inf")
        while len(codes) < len(self.ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
            codes = {rank: code for rank, process in self.ranks.items() if (code := process.poll()) is not None}
            if (self.passed or STOPPED in codes.values()) and not any(map(read, private.glob("heartbeat-*"))):
                return None
            if set(codes.values()) <= {0, STOPPED}:
                if self._is_still(private):
                    break
            elif deadline == float("inf") or (0 not in codes and self._completes(last(private / "heartbeat-0"))):
                deadline = time.monotonic() + 5
        if len(codes) < len(self.ranks):
            self._send(signal.SIGUSR2)
            time.sleep(1)
        return codes

    def _is_still(self, private: Path) -> bool:
        """Whether no rank has moved for too long."""
        untils = [beat.until for beat in map(last, private.glob("heartbeat-*")) if beat]
        return time.monotonic() - max(untils, default=self.began + self.start_s) >= self.still_s

    def _completes(self, beat: Beat | None) -> bool:
        """Whether the rank writes a checkpoint before it ends, and has written a piece of it lately."""
        return beat is not None and bool(beat.busy) and time.monotonic() - beat.until < self.still_s

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.passed:
            time.sleep(0.05)

    def _note(self, **event: Any) -> None:
        self.events.write(f"{json.dumps({'time': round(time.time(), 3), **event})}\n".encode())
