"""Measures what grows with the number of ranks in Echelon itself, without a network: 64, 512 and 4,096 ranks.

    python -m scripts.bench.ranks [--quick] [--json FILE]

- The agreed word of a step: each rank is a thread that runs the trainer's own code on queues instead of sockets.
- Start-up: the settings of all ranks, as one rank reads and compares them.
- A checkpoint of parts: a process for each hundred ranks writes their files, rank 0 makes them one, a rank opens them.

Messages, bytes, files and mappings are counted; seconds are those of this machine. It takes about a minute.
"""

import json
import math
import multiprocessing
import os
import queue
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from scripts.bench.harness import Report, Row, parser
from scripts.command import command
from trainer.checkpoint import commit
from trainer.checkpoint.fence import Attempt
from trainer.checkpoint.manifest import verify
from trainer.checkpoint.parts import open_parts, part_section
from trainer.checkpoint.serialize import Part
from trainer.checkpoint.snapshot import Snapshot
from trainer.checks.plan import refuse_other_ranks
from trainer.comm import ranks as comm
from trainer.config.options import Options

WORLDS = (64, 512, 4096)
PROCESS = 100  # ranks of a process
TENSORS = 8  # that are cut into rows over all ranks
ATTEMPT = Attempt(1, "bench")


class Queues:
    """Stands for `torch.distributed` between threads: a queue for each pair of ranks. Counts messages and bytes."""

    def __init__(self) -> None:
        self.lock, self.pairs = threading.Lock(), defaultdict[Any, queue.SimpleQueue[Tensor]](queue.SimpleQueue)
        self.sent, self.bytes = defaultdict[int, int](int), defaultdict[int, int](int)

    def pair(self, source: int, target: int) -> "queue.SimpleQueue[Tensor]":
        with self.lock:
            return self.pairs[source, target]

    def isend(self, tensor: Tensor, group: Any, group_dst: int) -> Any:
        self.sent[group.rank()] += 1
        self.bytes[group.rank()] += tensor.nbytes
        self.pair(group.rank(), group_dst).put(tensor.clone())
        return mock.Mock()

    send = isend

    def recv(self, tensor: Tensor, group: Any, group_src: int) -> None:
        tensor.copy_(self.pair(group_src, group.rank()).get(timeout=60))


def agree(world: int) -> Row:
    """Run the agreement of a step on `world` threads.

    Raises:
        AssertionError: A rank has another sum.
    """
    queues, sums = Queues(), dict[int, list[int]]()

    def run(rank: int) -> None:
        group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: world)
        sums[rank] = comm.add_up(torch.tensor([rank, 1, 0, 0, 2**40]), group).tolist()

    threading.stack_size(1 << 18)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    began = time.perf_counter()
    with mock.patch.object(comm, "dist", queues):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    threading.stack_size(0)
    assert all(sums[rank] == [world * (world - 1) // 2, world, 0, 0, world * 2**40] for rank in range(world))
    return {
        "part": "agreed word of a step", "ranks": world, "messages of a rank": max(queues.sent.values()),
        "bytes of a rank": max(queues.bytes.values()), "bytes by an all-gather": 40 * (world - 1),
        "s, all threads": time.perf_counter() - began,
    }  # fmt: skip


def start_up(world: int) -> Row:
    """Read and compare the settings of all ranks, as each rank does once."""
    own = {f"trainer.{key}": value for key, value in asdict(Options()).items()}
    text = json.dumps(own)
    began = time.perf_counter()
    rows = [json.loads(text) for _ in range(world)]
    refuse_other_ranks(own, lambda value: rows)
    seconds = time.perf_counter() - began
    return {
        "part": "settings at the start", "ranks": world, "rounds": math.ceil(math.log2(world)),
        "bytes that a rank gets": len(text) * world, "s of a rank": seconds,
    }  # fmt: skip


def stage(folder: Path, ranks: range, world: int) -> list[Any]:
    entries = []
    for rank in ranks:
        part = {"model": {f"w{i}": Part(torch.full((1, 4), float(rank)), (world, 4), rank) for i in range(TENSORS)}}
        section = part_section(rank)
        files = dict(Snapshot().take({section: part}, f"{section}.json"))
        if not rank:
            files |= Snapshot().take({"model": {}, "optimizer": {}, "step": 1})
        entries.append(commit.stage(folder, 1, files, ATTEMPT, lambda: None))
    return entries


def checkpoint(world: int) -> Row:
    """Write, commit, verify and open a checkpoint that each rank has a part of."""
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.perf_counter()
        parts = [range(first, min(first + PROCESS, world)) for first in range(0, world, PROCESS)]
        with multiprocessing.get_context("fork").Pool(min(len(parts), 2 * (os.cpu_count() or 1))) as pool:
            staged = pool.starmap(stage, [(folder, part, world) for part in parts], chunksize=1)
        took = {"stage, s, all ranks": time.perf_counter() - began}
        began = time.perf_counter()
        path = commit.commit_staged(folder, 1, [entry for part in staged for entry in part], {}, ATTEMPT)
        took["commit, s"] = time.perf_counter() - began
        began, manifest = time.perf_counter(), verify(path, hashes=False)
        took["verify, s"] = time.perf_counter() - began
        files, maps = handles()
        began, found = time.perf_counter(), open_parts(path, manifest["files"], world)
        took["open, s, a rank"] = time.perf_counter() - began
        assert found["model"]["w0"].read(0, world - 1).tolist() == [[world - 1.0] * 4]
        size = (path / "MANIFEST.json").stat().st_size
        opened = [now - before for now, before in zip(handles(), (files, maps), strict=True)]
        return {
            "part": "checkpoint of parts", "ranks": world, **took, "manifest, MB": size / 1e6,
            "files": len(manifest["files"]), "files held open": opened[0], "mappings": opened[1],
        }  # fmt: skip


def handles() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())


def main() -> int:
    args = parser("ranks", __doc__, "64 and 512 ranks", "ignored: everything is measured once").parse_args()
    with Report(args.json) as report:
        for measure in (agree, start_up, checkpoint):
            report.add([measure(world) for world in (WORLDS[:2] if args.quick else WORLDS)])
    return 0


if __name__ == "__main__":
    command(main)
