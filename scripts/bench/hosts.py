"""Turns of ranks in the hosts of a cluster: the bench's side, and the server of turns that each rank is.

A turn pauses four times for an answer: set up, settled, done, settled again. Bytes sent between the two settled states
are counted. When the link changes no packet is on its way, since the kernel drops packets that wait for a link.
"""

import contextlib
import importlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.bench.harness import Failed, Row
from scripts.cluster.netns import Cluster, Process, end
from trainer.callback import Callback, Role
from trainer.context import Context
from trainer.process.environment import Place
from trainer.process.exit import die_with_parent
from trainer.trainer import Trainer

ROOT = Path(__file__).parents[2]
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
SET_UP = 4  # steps before the link gets slow: DDP lays out its buckets, PowerSGD begins after two
TIMEOUT_S = 120.0
Ask = Callable[[Row], None]
Order = dict[str, Any]


class Ranks:
    """A process in each host that runs turns: `python -m SERVER`. A turn that fails is followed by new processes."""

    def __init__(self, cluster: Cluster, folder: Path, server: str) -> None:
        self.cluster, self.folder, self.server = cluster, folder, server
        self.processes: list[Process] = []
        self.start()

    def start(self) -> None:
        self.cluster.shape(None)
        for process in self.processes:
            end(process)
        self.answers: queue.SimpleQueue[tuple[int, Row]] = queue.SimpleQueue()
        env = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        words, pipe = [sys.executable, "-m", *self.server.split()], subprocess.PIPE
        with open(self.folder / "stderr", "ab") as log:
            self.processes = [
                self.cluster.popen(host, words, env, text=True, stdin=pipe, stdout=pipe, stderr=log)
                for host in range(self.cluster.hosts)
            ]
        for rank, process in enumerate(self.processes):
            threading.Thread(target=self._listen, args=(self.answers, rank, process.stdout), daemon=True).start()
        self._hear(TIMEOUT_S)

    @staticmethod
    def _listen(answers: "queue.SimpleQueue[tuple[int, Row]]", rank: int, lines: Iterable[str]) -> None:
        for line in lines:
            answers.put((rank, json.loads(line)))
        answers.put((rank, {"error": "process ended"}))

    def _hear(self, seconds: float) -> list[Row]:
        """Wait for an answer of each rank. If a rank fails, the others have a second to report their own failure."""
        answers: dict[int, Row] = {}
        deadline = time.monotonic() + seconds
        while len(answers) < len(self.processes):
            try:
                rank, answer = self.answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if "error" in answer:
                deadline = min(deadline, time.monotonic() + 1)
            if "error" not in answers.get(rank, {}):
                answers[rank] = answer
        silent = {rank: "silent" for rank in range(len(self.processes)) if rank not in answers}
        failed = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer} or silent
        if failed:
            raise Failed("; ".join(f"rank {rank}: {error}" for rank, error in failed.items()))
        return [answers[rank] for rank in sorted(answers)]

    def _ask(self, words: Iterable[Any], seconds: float) -> list[Row]:
        for process, word in zip(self.processes, words, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(word) + "\n")
            process.stdin.flush()
        return self._hear(seconds)

    def turn(
        self, model: str, name: str, rate: str, steps: int, patience_s: float, slow_set_up: bool = False
    ) -> dict[str, float]:
        """Let all ranks train `steps` timed steps of the row `name`. Return means over ranks, of a step.

        Raises:
            Failed: a rank failed, or was silent for longer than `patience_s` and a time-out.
        """
        go, link = ["go"] * self.cluster.hosts, None if rate == "unlimited" else rate
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            order = {"row": name, "model": model, "world": len(go), "store": f"{folder}/store", "steps": steps}
            try:
                self.cluster.shape(link if slow_set_up else None)
                self._ask(({**order, "rank": rank} for rank in range(len(go))), TIMEOUT_S + patience_s * slow_set_up)
                self._ask(go, TIMEOUT_S)
                self.cluster.shape(link)
                times, sent = (self._ask(go, patience_s + TIMEOUT_S) for _ in range(2))
                self.cluster.shape(None)
                self._ask(go, TIMEOUT_S)
            except (Failed, BrokenPipeError) as error:
                self.start()
                raise Failed(str(error)) from None
        return {key: statistics.mean(each[key] for each in part) for part in (times, sent) for key in part[0]}


@contextlib.contextmanager
def ranks_in(hosts: int, server: str) -> Iterator[Ranks]:
    with tempfile.TemporaryDirectory() as folder, Cluster(hosts) as cluster:
        yield Ranks(cluster, Path(folder), server)


@dataclass
class Clock:
    """The steps of a turn, by number. `ask` sends a message to the bench and waits for the answer."""

    ask: Ask
    steps: int  # that are timed
    warm: int = 5  # steps before these
    every: int = 1  # steps from one message to the next

    def __iter__(self) -> Iterator[int]:
        yield from range(SET_UP)
        self.ask({"set up": True})
        sent = settled()
        self.ask({"settled": True})
        yield from range(SET_UP, self.warm)
        began, worked, busy = time.perf_counter(), time.process_time(), machine_s()
        yield from range(self.warm, self.warm + self.steps)
        took = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - worked, "busy": machine_s() - busy}
        self.ask({key: value / self.steps for key, value in took.items()})
        meetings = (self.warm + self.steps) // self.every - SET_UP // self.every
        self.ask({"sent": (settled() - sent) / (meetings * self.every)})


def machine_s() -> float:
    """Read the CPU seconds of all processes since the machine's start: user, nice and system."""
    return sum(map(int, Path("/proc/stat").read_text().split(maxsplit=4)[1:4])) / os.sysconf("SC_CLK_TCK")


def settled() -> int:
    """Wait until no packet is on its way, and read the bytes sent."""
    sent, before = int(SENT.read_text()), -1
    while sent != before:
        time.sleep(0.2)
        before, sent = sent, int(SENT.read_text())
    return sent


class Over(Exception):
    """The end of a turn's steps. Validation and the last checkpoint are skipped."""


class Timed(Callback):
    role = Role.MEASURE  # after the callbacks that train

    def __init__(self, clock: Iterable[int]) -> None:
        self.steps = iter(clock)

    def on_fit_start(self, trainer: Context) -> None:
        next(self.steps)

    def on_step_end(self, trainer: Context) -> None:
        if next(self.steps, None) is None:
            trainer.emit("on_flush")  # deferred all-reduces need their peers
            raise Over


def fit(trainer: Trainer) -> None:
    """Train until a callback raises `Over`."""
    try:
        trainer.fit()
    except Over:
        trainer.close()


def place_of(order: Order) -> Place:
    return Place(order["rank"], order["world"], 0, 1, order["store"], "benchmark")


def serve(turn: Callable[[Order, Ask], None], loads: str = "transformers.models.bert.modeling_bert") -> None:
    """Read orders as lines of JSON from standard input, and run `turn` for each in a child process."""
    importlib.import_module(loads)  # once, for all children
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that the output of libraries does not mix with answers

    def tell(answer: Row) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    def ask(question: Row) -> None:
        tell(question)
        sys.stdin.readline()

    tell({"started": True})
    for line in iter(sys.stdin.readline, ""):
        server = os.getpid()
        child = os.fork()
        if not child:
            die_with_parent(server)
            torch.set_num_threads(1)
            try:
                turn(json.loads(line), ask)
            except BaseException as error:
                traceback.print_exc()
                tell({"error": f"{type(error).__name__}: {error}".splitlines()[0][:100]})
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        tell({"error": f"ended with code {code}"} if code else {"ended": True})
