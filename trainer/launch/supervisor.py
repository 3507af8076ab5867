"""Starts the ranks of one node, and restarts them after a failure that may not recur. Imports no torch."""

import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from trainer.errors import STOPPED, fold
from trainer.files import Appended
from trainer.launch.failure import blame_memory, find_failure
from trainer.launch.flight_recorder import find_mismatch
from trainer.launch.forkserver import ForkServer
from trainer.launch.pool import Pool, Process
from trainer.launch.restart_policy import RestartPolicy
from trainer.process.cgroup import oom_kills
from trainer.process.crash import summarize_crash
from trainer.process.environment import Place, variables
from trainer.process.heartbeat import Beat, last, read
from trainer.process.signals import EARLY, WARNINGS, SignalListener
from trainer.process.stdio import show_cursor
from trainer.process.temporary import temporary_folder
from trainer.timeouts import PEERS_S, STACKS_S, SUSPENDED_S


class Supervisor:
    """Runs the ranks of a node as forks of one process, and restarts them.

    Ranks of one node meet in a file, a new one for each attempt, so that only gloo's ports on loopback are open. Ranks
    on several nodes meet at MASTER_ADDR and MASTER_PORT. Each rank has its own session, and dies with this process.
    Stop signals are forwarded. When a rank fails, the others get 5 s to exit. The failure is printed, and written to
    events.jsonl in the log folder.

    Args:
        describe_run: Returns an attempt's config and decisions as JSON, given whether an earlier attempt made a step.
            They may contain secrets, so they stay in memory, behind a descriptor that ranks inherit.
        place: The place of the node's first rank.
        resume_hint: Returns the command that resumes the run, for a failure that no rank has reported.
        restarts: The limit of `RestartPolicy`.
        still_s: Seconds without a step on any rank after which all are killed, with their stacks in the logs.
        start_s: Seconds allowed until the first rank has planned the run.
    """

    def __init__(
        self,
        describe_run: Callable[[bool], str],
        argv: list[str],
        place: Place,
        logs: Path,
        resume_hint: Callable[[], str],
        restarts: int,
        still_s: float,
        start_s: float,
    ) -> None:
        self.describe_run, self.argv, self.place = describe_run, argv, place
        self.logs, self.resume_hint, self.still_s, self.start_s = logs, resume_hint, still_s, start_s
        self.policy = RestartPolicy(restarts)
        self.pool: Pool | None = None  # the ranks of this attempt
        self.beats: dict[str, BinaryIO] = {}  # the ranks' heartbeat files of this attempt
        self.passed: list[int] = []  # stop signals that were forwarded
        self.moved = False  # an attempt has made a step, so the next one resumes from its checkpoints
        self.started, self.began = time.time(), time.monotonic()  # of the attempt
        self.looked = self.awake = self.began  # time of the last poll of the ranks; end of the last suspension
        self.events = Appended(logs / "events.jsonl")

    def run(self) -> int:
        """Run attempts until one succeeds or the policy gives up; return the run's exit code."""
        with (
            SignalListener(self._pass_on),
            contextlib.closing(self.events),
            contextlib.closing(ForkServer(self.argv, self.place)) as self.server,
        ):
            for attempt in itertools.count():
                code = self._attempt(attempt)
                if code is not None:
                    return code
                self._pause(self.policy.pause_s)
        raise AssertionError("unreachable")

    def _attempt(self, attempt: int) -> int | None:
        """Run one attempt; return the run's exit code, or None for a restart."""
        memory = os.fdopen(os.memfd_create("run"), "wb", buffering=0)
        self.logs.mkdir(parents=True, exist_ok=True)
        with temporary_folder() as private, memory:
            self.started, self.began = time.time(), time.monotonic()
            self.looked, kills, self.beats = self.began, oom_kills(), {}
            memory.write(self.describe_run(self.moved).encode())
            self.pool = Pool(self.place, private, partial(self._start, memory.fileno(), attempt, private))
            with self.pool:
                codes = self._wait(self.pool, private)
            if codes is None:
                name = signal.Signals(self.passed[0]).name if self.passed else "a signal to a rank"
                print(f"echelon: {name}: {EARLY}{self.resume_hint()}", file=sys.stderr, flush=True)
                return 130 if name == "SIGINT" else STOPPED
            failure = find_failure(codes, self.pool.ranks, private, self.logs, self.passed)
            if failure is None:
                return max(codes.values())
            failure = blame_memory(failure) if oom_kills() > kills else failure
            beat = read(self._heartbeats(private).get(f"heartbeat-{failure.rank}", private))
            cleaned = not private.exists()
        self.moved |= cleaned or (beat is not None and beat.step > beat.began)
        of_machines = not (self.passed or self.policy.is_final(failure, beat))  # before `decide` counts its step
        code, decision = (failure.code, "") if self.passed else self.policy.decide(failure, beat)
        mismatch, step = find_mismatch(self.logs, self.started), beat and beat[1]
        if beat and beat.step >= 0 and not self.passed and not failure.reported:  # else the rank itself has written it
            line = failure.text.rpartition("\n")[2]
            summarize_crash(self.logs.parent / "summary.json", line, {"steps": beat.step})
        noted = {"failed": failure.text, "odd": mismatch, "code": code, "of_machines": of_machines}
        self._note(attempt=attempt, rank=failure.rank, step=step, **noted)
        show_cursor()
        text = fold(failure.text) + ("" if failure.reported or not code else self.resume_hint())
        print(*filter(None, (text, mismatch, decision)), sep="\n", file=sys.stderr, flush=True)
        return code or None

    def _start(self, run: int, attempt: int, private: Path, place: Place) -> Process:
        heartbeat = str(private / f"heartbeat-{place.rank}")
        env = {**variables(place, private), "ECHELON_ATTEMPT": str(attempt), "ECHELON_HEARTBEAT": heartbeat}
        with open(self.logs / f"rank{place.rank}.log", "ab") as log:
            return self.server.fork(env, run, log.fileno() if place.rank else None)

    def _pass_on(self, number: int) -> None:
        self.passed.append(number)
        if self.pool:
            self.pool.send(signal.SIGTERM if number in WARNINGS else number)  # at SIGUSR2 ranks write their stacks

    def _wait(self, pool: Pool, private: Path) -> Mapping[int, int] | None:
        """Return the exit codes of the ranks that exit by themselves; None if stopped before the first step.

        Once a rank has failed, the others get 5 s, or longer while rank 0 writes a checkpoint. Ranks that still run
        then write their stacks to their logs, and have no exit code.
        """
        codes: Mapping[int, int] = {}
        deadline = float("inf")
        for codes in pool.watch():
            if (self.passed or STOPPED in codes.values()) and not any(map(read, self._heartbeats(private).values())):
                return None
            if set(codes.values()) <= {0, STOPPED}:
                if self._is_still(private):
                    break
            elif deadline == float("inf") or (
                0 not in codes and self._completes(last(self._heartbeats(private).get("heartbeat-0", private)))
            ):
                deadline = time.monotonic() + PEERS_S
            if time.monotonic() >= deadline:
                break
        if len(codes) < len(pool.ranks):
            pool.send(signal.SIGUSR2)
            time.sleep(STACKS_S)
        return codes

    def _is_still(self, private: Path) -> bool:
        """Return whether no rank has progressed for too long, not counting time while this process was suspended."""
        now = time.monotonic()
        self.looked, before = now, self.looked
        if now - before > SUSPENDED_S:
            self.awake = now
        untils = [beat.until for beat in map(last, self._heartbeats(private).values()) if beat]
        return now - max(self.awake, max(untils, default=self.began + self.start_s)) >= self.still_s

    def _heartbeats(self, private: Path) -> dict[str, Path]:
        """Return where to read heartbeats. The files stay open because a clean-up of TMPDIR may remove them."""
        for path in private.glob("heartbeat-*"):
            if path.name not in self.beats:
                with contextlib.suppress(FileNotFoundError):
                    self.beats[path.name] = path.open("rb")
        return {name: Path(f"/proc/self/fd/{file.fileno()}") for name, file in self.beats.items()}

    def _completes(self, beat: Beat | None) -> bool:
        """Return whether the rank is writing its last checkpoint, and has recently written a piece of it."""
        return beat is not None and bool(beat.busy) and time.monotonic() - beat.until < self.still_s

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.passed:
            time.sleep(0.05)

    def _note(self, **event: Any) -> None:
        self.events.write(f"{json.dumps({'time': round(time.time(), 3), **event})}\n".encode())
