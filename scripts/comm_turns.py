"""Runs the turns of bench_comm.py: tells the ranks what to train, and makes the link slow when it is time."""

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

from bench_report import Row as Cells
from cluster import Cluster, Process, end
from comm_rank import TIMEOUT_S

ROOT = Path(__file__).parents[1]
Turn = dict[str, float]  # seconds, a rank's CPU seconds, the machine's, and bytes sent, each a step: means over ranks


class Failed(Exception):
    """Of a turn: what a rank said."""


class Ranks:
    """A process in each host that runs turns; new ones after a turn that failed."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
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
                    host, [sys.executable, str(ROOT / "scripts" / "comm_rank.py")], env, text=True,
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
        answers.put((rank, {"error": "its process has ended"}))

    def _hear(self, seconds: float) -> list[Cells]:
        """An answer of each rank. Where one fails the others do within a second, and each may know something."""
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
