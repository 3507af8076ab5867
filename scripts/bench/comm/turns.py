"""Runs turns: gives orders to the ranks, one in each host, and shapes the links when the set-up is over."""

import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.bench.comm.rank import TIMEOUT_S
from scripts.bench.report import Row as Cells
from scripts.cluster.netns import Cluster, Process, end

ROOT = Path(__file__).parents[3]
Turn = dict[str, float]  # per step, means over ranks: seconds, CPU seconds of a rank and of the machine, bytes sent


class Failed(Exception):
    """The failure of a turn, as the ranks report it."""


class Ranks:
    """A process in each host that runs turns. A turn that fails is followed by new processes.

    `server` is the module that they run.
    """

    def __init__(self, cluster: Cluster, folder: Path, server: str) -> None:
        self.cluster, self.folder, self.server = cluster, folder, server
        self.processes: list[Process] = []
        self.start()

    def start(self) -> None:
        self.cluster.shape(None)
        for process in self.processes:
            end(process)
        self.answers: queue.SimpleQueue[tuple[int, Cells]] = queue.SimpleQueue()
        env = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        with open(self.folder / "stderr", "ab") as log:
            self.processes = [
                self.cluster.popen(
                    host, [sys.executable, "-m", self.server], env, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                )
                for host in range(self.cluster.hosts)
            ]  # fmt: skip
        for rank, process in enumerate(self.processes):
            threading.Thread(target=self._listen, args=(self.answers, rank, process.stdout), daemon=True).start()
        self._hear(TIMEOUT_S)

    @staticmethod
    def _listen(answers: "queue.SimpleQueue[tuple[int, Cells]]", rank: int, lines: Iterable[str]) -> None:
        for line in lines:
            answers.put((rank, json.loads(line)))
        answers.put((rank, {"error": "process ended"}))

    def _hear(self, seconds: float) -> list[Cells]:
        """Wait for an answer of each rank. If a rank fails, the others have a second to report their own failure."""
        answers: dict[int, Cells] = {}
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

    def _tell(self, words: Iterable[Any]) -> None:
        for process, word in zip(self.processes, words, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(word) + "\n")
            process.stdin.flush()

    def turn(self, model: str, name: str, rate: str, steps: int, patience_s: float, slow_set_up: bool) -> Turn:
        """Let all ranks train `steps` timed steps of the row `name`.

        Raises:
            Failed: a rank failed, or was silent for longer than `patience_s` and a time-out.
        """
        hosts, go = self.cluster.hosts, ["go"] * self.cluster.hosts
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            order = {"row": name, "model": model, "world": hosts, "store": f"{folder}/store", "steps": steps}
            link = None if rate == "unlimited" else rate
            try:
                if slow_set_up:
                    self.cluster.shape(link)
                self._tell({**order, "rank": rank} for rank in range(hosts))
                self._hear(TIMEOUT_S + patience_s * slow_set_up)
                self._tell(go)
                self._hear(TIMEOUT_S)
                self.cluster.shape(link)
                self._tell(go)
                times = self._hear(patience_s + TIMEOUT_S)
                self._tell(go)
                sent = self._hear(patience_s + TIMEOUT_S)
                self.cluster.shape(None)
                self._tell(go)
                self._hear(TIMEOUT_S)
            except (Failed, BrokenPipeError) as error:
                self.start()
                raise Failed(str(error)) from None
        turns = [{**of_time, **of_bytes} for of_time, of_bytes in zip(times, sent, strict=True)]
        return {key: statistics.mean(turn[key] for turn in turns) for key in turns[0]}
