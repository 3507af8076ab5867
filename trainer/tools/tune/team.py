"""Runs trials in separate processes, a fork per rank, so that a failure, a hang or a lack of memory only ends them.

Without a launcher, one process forks all ranks of this machine. Under a launcher, each process forks its own rank, and
the first one sends the tasks over the launcher's store. The ranks of a trial then meet at a new port of the first
machine.
"""

import contextlib
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.comm.ranks import in_collective
from trainer.errors import EXIT_CODES, ConfigError, is_out_of_memory, printable
from trainer.launch.pool import Pool, Process, fork
from trainer.process.environment import Place, threads_of
from trainer.timeouts import TRIAL_PEERS_S, TRIAL_RESERVE_S

Answer = dict[str, Any]
PEERS = "its peers have failed"
OUT_OF_MEMORY = ("out of memory", "as the kernel does when memory runs out")  # in the errors of trials
FOREVER = timedelta(days=30)
LAUNCHERS_OWN = ("ECHELON_HEARTBEAT", "ECHELON_ERROR_FILE", "ECHELON_ATTEMPT")
LAUNCHERS_OWN += ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE")  # a trial would use torchrun's port


class TrialFailed(Exception):
    """A trial without a result; the message is one line."""


@dataclass
class Team:
    """The ranks of a search."""

    place: Place  # the first rank that this process forks; `place.starts` means all of its node
    folder: Path  # for temporary files of the trials; private to this process unless ranks share a machine
    work: Callable[[Any, Place], Answer]  # runs one task on one rank, and returns its result
    store: Any = None  # of the launcher's processes; None: this process forks all ranks
    number: int = 0  # of the trial

    def __post_init__(self) -> None:
        count = self.place.local_world if self.place.starts else 1
        self.own = range(self.place.rank, self.place.rank + count)
        if len(self.own) < self.place.world:
            self.store = open_store(self.place)

    @property
    def leads(self) -> bool:
        return self.place.rank == 0

    def run(self, task: dict[str, Any], limit_s: float) -> list[Answer]:
        """Run a task on all ranks, and return the results by rank. For the first process alone.

        Raises:
            TrialFailed: The task failed on a rank, or took longer than `limit_s`.
        """
        self.number += 1
        if self.store is not None:
            task = {**task, "port": free_port()}
            self.store.set(f"task-{self.number}", json.dumps([task, limit_s]))
        answers = self._run_own(task, limit_s)
        for rank in set(range(self.place.world)) - set(self.own):
            assert self.store is not None
            try:
                self.store.wait([f"answer-{self.number}-{rank}"], timedelta(seconds=limit_s + TRIAL_RESERVE_S))
                answers[rank] = json.loads(self.store.get(f"answer-{self.number}-{rank}"))
            except RuntimeError:  # torch's of a wait that ends, and of a process that has gone
                answers[rank] = {"error": "its process does not answer", "of_peer": False}
        failed = {rank: answer for rank, answer in sorted(answers.items()) if "error" in answer}
        if failed:
            rank = min(failed, key=lambda rank: (failed[rank]["of_peer"], rank))
            raise TrialFailed(f"rank {rank}: {failed[rank]['error']}" if self.place.world > 1 else failed[0]["error"])
        return [answers[rank] for rank in sorted(answers)]

    def serve(self) -> None:
        """Run the first process's tasks until it sends the end, or has ended."""
        while True:
            self.number += 1
            try:
                self.store.wait([f"task-{self.number}"], FOREVER)
                message = json.loads(self.store.get(f"task-{self.number}"))
            except RuntimeError:  # the first process has ended
                return
            if message is None:
                self.store.set(f"left-{self.place.rank}", "")
                return
            for rank, answer in self._run_own(*message).items():
                self.store.set(f"answer-{self.number}-{rank}", json.dumps(answer))

    def close(self) -> None:
        """Release the processes of other ranks."""
        if self.store is not None and self.leads:
            with contextlib.suppress(RuntimeError):
                self.store.set(f"task-{self.number + 1}", json.dumps(None))
                others = [f"left-{rank}" for rank in range(0, self.place.world, len(self.own)) if rank not in self.own]
                self.store.wait(others, timedelta(seconds=TRIAL_PEERS_S))  # the store ends with this process

    def _run_own(self, task: dict[str, Any], limit_s: float) -> dict[int, Answer]:
        """Fork this process's ranks, and wait for all; kill them if one fails anywhere, or at the limit."""
        answers, end, late = dict[int, Answer](), time.monotonic() + limit_s, f"no end within {limit_s:g} s"
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            private = Path(name)

            def start(place: Place) -> Process:
                return fork(place, partial(self._run_rank, task, private), self.folder / f"rank{place.rank}.log")

            with Pool(self.place, private, start) as pool:
                for codes in pool.watch():
                    answers = {rank: read_answer(private, rank, code) for rank, code in codes.items()}
                    if self._failed(answers):
                        known = any("error" in answer and not answer["of_peer"] for answer in answers.values())
                        late, end = PEERS, min(end, time.monotonic() + (0 if known else TRIAL_PEERS_S))
                    if time.monotonic() >= end:
                        break
        peers = {"error": late, "of_peer": late == PEERS}
        return {rank: answers.get(rank, peers) for rank in self.own}

    def _failed(self, answers: dict[int, Answer]) -> bool:
        """Return whether a rank has failed anywhere, and report it to the others."""
        own = any("error" in answer for answer in answers.values())
        if own and self.store is not None:
            self.store.set(f"failed-{self.number}", "")
        return own or (self.store is not None and self.store.check([f"failed-{self.number}"]))

    def _run_rank(self, task: dict[str, Any], private: Path, place: Place) -> int:
        """Run the task as a rank, in the fork, and write the answer."""
        try:
            if not place.store:
                os.environ["MASTER_PORT"] = str(task["port"])
            for name in LAUNCHERS_OWN:
                os.environ.pop(name, None)
            torch.set_num_threads(int(threads_of(place.local_world)))
            answer = self.work(task, place)
        except BaseException as error:
            answer = {"error": in_a_line(error), "of_peer": in_collective(error)}
        (private / f"answer-{place.rank}").write_text(json.dumps(answer))
        return 0


def read_answer(private: Path, rank: int, code: int) -> Answer:
    answer = private / f"answer-{rank}"
    if code == 0 and answer.exists():
        return json.loads(answer.read_text())
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    short = f", {OUT_OF_MEMORY[1]}" if code == -signal.SIGKILL else ""
    return {"error": f"{how}{short}", "of_peer": False}


def open_store(place: Place) -> Any:
    """Open the store shared by the launcher's processes: one per node, or one per rank."""
    each = place.local_world if place.starts else 1
    try:
        found = dist.rendezvous("env://", place.rank // each, place.world // each, timeout=timedelta(minutes=5))
        return next(found)[0]
    except ValueError as error:
        raise ConfigError(f"{place.launcher}: {error}; start tune by torchrun or srun, or without a launcher") from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def in_a_line(error: BaseException) -> str:
    if isinstance(error, tuple(EXIT_CODES)):
        return printable(str(error))
    if is_out_of_memory(error):
        return OUT_OF_MEMORY[0]
    lines = str(error).strip().splitlines() or [""]
    return printable(f"{type(error).__name__}: {lines[0]}")[:200]
