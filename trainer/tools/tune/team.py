"""Runs trials in processes of their own: a fork for each rank, which a failure, a hang or a lack of memory ends alone.

Without a launcher, one process forks all ranks of this machine. Under a launcher, each process forks its own rank, and
obeys the first one over the launcher's store. The ranks of a trial then meet at a new port of the first machine.
"""

import contextlib
import json
import multiprocessing.connection
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from trainer.errors import EXIT_CODES, ConfigError, is_out_of_memory, printable
from trainer.launch.worker import in_collective
from trainer.process.environment import Place, cores
from trainer.process.exit import die_with_parent
from trainer.timeouts import TRIAL_LOOK_S, TRIAL_PEERS_S, TRIAL_RESERVE_S

Answer = dict[str, Any]
PEERS = "its peers have failed"
OUT_OF_MEMORY = ("out of memory", "as the kernel does when memory runs out")  # in the errors of trials
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that end the search
FOREVER = timedelta(days=30)
LAUNCHERS_OWN = ("ECHELON_HEARTBEAT", "ECHELON_ERROR_FILE", "ECHELON_ATTEMPT")
LAUNCHERS_OWN += ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE")  # a trial would use torchrun's port


class TrialFailed(Exception):
    """A trial that gave no result, in one line."""


@dataclass
class Team:
    """The ranks of a search.

    Args:
        place: The first rank that this process forks; `place.starts` means all of its node.
        folder: For temporary files of the trials; private to this process unless ranks share a machine.
        work: Runs one order on one rank, and returns its result.
    """

    place: Place
    folder: Path
    work: Callable[[Any, Place], Answer]
    store: Any = None  # of the launcher's processes; None: this process forks all ranks
    number: int = 0  # of the trial
    pids: dict[int, int] = field(default_factory=dict)  # rank -> process

    def __post_init__(self) -> None:
        count = self.place.local_world if self.place.starts else 1
        self.own = range(self.place.rank, self.place.rank + count)
        if len(self.own) < self.place.world:
            self.store = open_store(self.place)

    @property
    def leads(self) -> bool:
        return self.place.rank == 0

    def run(self, order: dict[str, Any], limit_s: float) -> list[Answer]:
        """Run an order on all ranks, and return the results by rank. For the first process alone.

        Raises:
            TrialFailed: The order failed on a rank, or took longer than `limit_s`.
        """
        self.number += 1
        if self.store is not None:
            order = {**order, "port": free_port()}
            self.store.set(f"order-{self.number}", json.dumps([order, limit_s]))
        answers = self._run_own(order, limit_s)
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

    def obey(self) -> None:
        """Run the orders of the first process until it says the end, or has ended."""
        while True:
            self.number += 1
            try:
                self.store.wait([f"order-{self.number}"], FOREVER)
                word = json.loads(self.store.get(f"order-{self.number}"))
            except RuntimeError:  # the first process has ended
                return
            if word is None:
                self.store.set(f"left-{self.place.rank}", "")
                return
            for rank, answer in self._run_own(*word).items():
                self.store.set(f"answer-{self.number}-{rank}", json.dumps(answer))

    def close(self) -> None:
        """Kill what still runs; let the processes of other ranks go."""
        self._kill()
        if self.store is not None and self.leads:
            with contextlib.suppress(RuntimeError):
                self.store.set(f"order-{self.number + 1}", json.dumps(None))
                others = [f"left-{rank}" for rank in range(0, self.place.world, len(self.own)) if rank not in self.own]
                self.store.wait(others, timedelta(seconds=TRIAL_PEERS_S))  # the store ends with this process

    def _run_own(self, order: dict[str, Any], limit_s: float) -> dict[int, Answer]:
        """Fork this process's ranks, and wait for all; kill them if one fails anywhere, or at the limit."""
        answers: dict[int, Answer] = {}
        pipes: dict[Any, int] = {}
        end = time.monotonic() + limit_s
        late = f"no end within {limit_s:g} s"
        try:
            for rank in self.own:
                pipes[self._fork(rank, order)] = rank
            while len(answers) < len(self.own) and (left := end - time.monotonic()) > 0:
                open_ones = [pipe for pipe, rank in pipes.items() if rank not in answers]
                for pipe in multiprocessing.connection.wait(open_ones, min(left, TRIAL_LOOK_S if self.store else left)):
                    rank = pipes[pipe]
                    answers[rank] = self._read(pipe, rank)
                if self._failed(answers):
                    known = any("error" in answer and not answer["of_peer"] for answer in answers.values())
                    late, end = PEERS, min(end, time.monotonic() + (0 if known else TRIAL_PEERS_S))
        finally:
            self._kill()
            for pipe in pipes:
                pipe.close()
        peers = {"error": late, "of_peer": late == PEERS}
        return {rank: answers.get(rank, peers) for rank in self.own}

    def _failed(self, answers: dict[int, Answer]) -> bool:
        """Return whether a rank has failed anywhere; tell others."""
        key = f"failed-{self.number}"
        own = any("error" in answer for answer in answers.values())
        if self.store is None:
            return own
        if own:
            self.store.set(key, "")
        return own or self.store.check([key])

    def _fork(self, rank: int, order: dict[str, Any]) -> Any:
        read, write = multiprocessing.connection.Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with held(ENDING):
            pid = os.fork()
            if not pid:
                read.close()
                self._be(rank, order, write, parent)
            self.pids[rank] = pid
        write.close()
        return read

    def _be(self, rank: int, order: dict[str, Any], pipe: Any, parent: int) -> NoReturn:
        """Be a rank: run the order, answer and end."""
        try:
            os.setsid()
            die_with_parent(parent)
            for number in ENDING:
                signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            place, first = self.place, self.place.rank - self.place.local_rank
            store = "" if self.store else str(self.folder / f"store-{self.number}")
            place = Place(rank, place.world, rank - first, place.local_world, store, place.launcher or "tune")
            self._redirect(rank)
            self._set_up(place, order)
            answer = self.work(order, place)
        except BaseException as error:
            answer = {"error": in_a_line(error), "of_peer": in_collective(error)}
        with contextlib.suppress(Exception):
            pipe.send_bytes(json.dumps(answer).encode())
        os._exit(0)

    def _set_up(self, place: Place, order: dict[str, Any]) -> None:
        if place.store:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        else:
            os.environ["MASTER_PORT"] = str(order["port"])
        for name in LAUNCHERS_OWN:
            os.environ.pop(name, None)
        threads = os.environ.get("OMP_NUM_THREADS", "") or max(1, cores() // place.local_world)
        torch.set_num_threads(int(threads))

    def _redirect(self, rank: int) -> None:
        """Send all output of the rank into a file that only a developer reads."""
        file = os.open(self.folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)

    def _read(self, pipe: Any, rank: int) -> Answer:
        try:
            return json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            _, status = os.waitpid(self.pids.pop(rank), 0)
            code = os.waitstatus_to_exitcode(status)
            why = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            short = f", {OUT_OF_MEMORY[1]}" if code == -signal.SIGKILL else ""
            return {"error": f"{why}{short}", "of_peer": False}

    def _kill(self) -> None:
        """End the ranks with all that they started."""
        pids, self.pids = dict(self.pids), {}
        for pid in pids.values():
            for kill in (os.killpg, os.kill):  # the rank has no group yet in its first moment
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
        for pid in pids.values():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


@contextlib.contextmanager
def held(numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Hold signals back until the end of a fork, inside of which Python drops what a handler raises.

    Blocking them would not do: another thread takes a signal that this one blocks.
    """
    came: list[int] = []
    before = {number: signal.signal(number, lambda which, _: came.append(which)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for number in came:
            signal.raise_signal(number)


def open_store(place: Place) -> Any:
    """Open the store over which the launcher's processes meet: one of each node, or of each rank.

    Raises:
        ConfigError: The launcher has set no address.
    """
    each = place.local_world if place.starts else 1
    try:
        store, _, _ = next(
            dist.rendezvous("env://", place.rank // each, place.world // each, timeout=timedelta(minutes=5))
        )
        return store
    except ValueError as error:
        raise ConfigError(f"{place.launcher}: {error}; start tune by torchrun or srun, or without a launcher") from None


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def in_a_line(error: BaseException) -> str:
    """Return an error as one line."""
    if isinstance(error, tuple(EXIT_CODES)):
        return printable(str(error))
    if is_out_of_memory(error):
        return OUT_OF_MEMORY[0]
    lines = str(error).strip().splitlines() or [""]
    return printable(f"{type(error).__name__}: {lines[0]}")[:200]
