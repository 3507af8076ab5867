"""Measures what a checkpoint costs training: the stall of the loop, the steps during the write, the time to durable.

    python -m scripts.bench.checkpoint [--quick] [--size 100MB] [--threads 1] [--rounds 5] [--json FILE]

A Trainer trains square layers with AdamW on the CPU. In a turn, one of the ways to save saves the model and the
optimizer at the end of a step. The turn ends two steps after the files are on the disk. Peers don't sync their files,
so the bench does. Every way has a turn in each round.

A stall is a ratio to copying the same tensors into allocated memory in the same round. The row "nothing" saves nothing
for as many steps as Echelon's writer takes. Files are written to a temporary folder in the current folder, so they
measure its disk. The bench takes about 10 minutes, and memory of a few times the state.
"""

import ctypes
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.utils._pytree import tree_leaves

from scripts.bench.harness import Goal, Report, Rounds, Row, at_most, parser, positive
from scripts.bench.squares import Squares, quiet
from scripts.command import command
from trainer.callback import Callback
from trainer.checkpointing import Checkpointer
from trainer.process.environment import Place
from trainer.trainer import Trainer

WIDTH = 2048
LAYERS = {"100MB": 2, "2GB": 40}  # of WIDTH x WIDTH float32, with two moments each
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
BEFORE, AFTER = 5, 2  # steps of a turn before the save, and after it is durable
Done = Callable[[], bool]


class Way:
    """A way to save. `begin` returns when training may continue, with a function that tells whether all is done."""

    checkpointer: Checkpointer

    def __init__(self, folder: Path) -> None:
        self.folder, self.thread = folder, ThreadPoolExecutor(1)

    def begin(self, trainer: Trainer) -> Done:
        raise NotImplementedError

    def clean(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)


class Copy(Way):
    """Copies the state into allocated memory, the base of all ratios."""

    buffers: list[Tensor] | None = None

    def begin(self, trainer: Trainer) -> Done:
        leaves = tree_leaves(dict(self.checkpointer.collect().common))
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        if self.buffers is None:
            self.buffers = [torch.zeros_like(t) for t in tensors]
        began = time.perf_counter()
        torch._foreach_copy_(self.buffers, tensors)
        self.seconds = time.perf_counter() - began
        return lambda: True


class Nothing(Way):
    """Saves nothing, for as many steps as Echelon's writer takes."""

    steps, seconds = 10, 0.0

    def begin(self, trainer: Trainer) -> Done:
        last = trainer.step + self.steps
        return lambda: trainer.step >= last


class Echelon(Way):
    def begin(self, trainer: Trainer) -> Done:
        self.checkpointer.save()
        assert trainer.saver.writing is not None
        return trainer.saver.writing.done

    def clean(self) -> None:
        pass


class Peer(Way):
    """Saves a state by another library, and syncs the files in a thread, after they are written."""

    def begin(self, trainer: Trainer) -> Done:
        states = {"model": trainer.module.state_dict(), "optimizer": trainer.optimizer.state_dict()}
        return self.thread.submit(self.sync, self.save(states)).done

    def sync(self, written: Any) -> None:
        if isinstance(written, Future):
            written.result()
        for path in [*sorted(self.folder.rglob("*")), self.folder]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def save(self, states: dict[str, Any]) -> Any:
        torch.save(states, self.folder / "state.pt")


class DCP(Peer):
    def save(self, states: dict[str, Any]) -> Any:
        dcp.save(states, checkpoint_id=self.folder, no_dist=True)


class AsyncDCP(Peer):
    kind = AsyncCheckpointerType.THREAD

    def save(self, states: dict[str, Any]) -> Any:
        return dcp.async_save(states, checkpoint_id=self.folder, async_checkpointer_type=self.kind)


class ProcessDCP(AsyncDCP):
    kind = AsyncCheckpointerType.PROCESS


WAYS: dict[str, type[Way]] = {
    "copy": Copy,
    "nothing": Nothing,
    "Echelon": Echelon,
    "torch.save": Peer,
    "DCP": DCP,
    "DCP async, thread": AsyncDCP,
    "DCP async, process": ProcessDCP,
}


class Turns(Callback):
    def __init__(self, folder: Path, rounds: int) -> None:
        self.ways = {name: way(folder / str(i)) for i, (name, way) in enumerate(WAYS.items())}
        self.found, self.rounds, self.ended = Rounds.of(WAYS), rounds, time.perf_counter()

    def on_fit_start(self, trainer: Any) -> None:
        self.turns = self.take_turns(trainer)
        next(self.turns)

    def on_step_end(self, trainer: Any) -> None:
        self.turns.send(time.perf_counter() - self.ended)
        self.ended = time.perf_counter()

    def take_turns(self, trainer: Trainer) -> Generator[None, float, None]:
        """Take the turns of all rounds; each `yield` gives the seconds of a step. The first round allocates buffers."""
        for n in range(self.rounds + 1):
            for name in list(WAYS)[:: -1 if n % 2 else 1]:
                way, before, during = self.ways[name], list[float](), list[float]()
                while len(before) <= BEFORE:
                    before.append((yield))
                way.clean()
                began = time.perf_counter()
                done = way.begin(trainer)
                stall_s = getattr(way, "seconds", time.perf_counter() - began)
                while not during or not done():
                    during.append((yield))
                step_s, durable_s = statistics.median(before[1:]), time.perf_counter() - began
                turn = {"stall_s": stall_s, "durable_s": durable_s, "step_s": step_s}
                turn |= {"median": statistics.median(during) / step_s, "worst": max(during) / step_s}
                self.found.turns[name].append(turn)
                print(name, {key: round(value, 4) for key, value in turn.items()}, flush=True)
                if name == "Echelon":
                    Nothing.steps = len(during)
                for _ in range(AFTER):
                    yield
        trainer.stop("max_steps")
        yield


def keep_memory() -> None:
    """Let the process keep the memory that it frees.

    Otherwise each step gets new pages for its gradients from the kernel. The number of pages differs from step to
    step, and costs more time than a concurrent writer.
    """
    libc = ctypes.CDLL(None)
    for parameter, value in ((M_MMAP_THRESHOLD, 32 << 20), (M_TRIM_THRESHOLD, 1 << 30)):
        assert libc.mallopt(parameter, value)


def measure(size: str, threads: int, rounds: int) -> tuple[list[Row], list[Goal]]:
    torch.set_num_threads(threads)
    here = Path.cwd()
    with tempfile.TemporaryDirectory(dir=here) as folder:
        os.chdir(folder)
        try:
            turns = Turns(Path(folder), rounds)
            trainer = quiet(Squares(WIDTH, LAYERS[size]), {"turns": turns}, Place(), folder, 4)
            Way.checkpointer = trainer.loop.checkpointer
            trainer.fit()
        finally:
            os.chdir(here)
    if trainer.stop_reason == "signal":  # which the trainer has handled
        raise SystemExit(128 + signal.Signals[trainer.signals.name])
    return table(turns.found, size, threads)


def table(found: Rounds, size: str, threads: int) -> tuple[list[Row], list[Goal]]:
    counted = Rounds({name: seen[1:] for name, seen in found.turns.items()})
    copy_s, rounds = counted.median("copy", "stall_s"), len(counted.turns["copy"])
    part = f"{size} of state, {threads} thread(s), steps of {counted.median('copy', 'step_s'):.3f} s; {rounds} rounds; "

    def during(name: str, key: str) -> float | str:
        return "-" if name in ("copy", "torch.save", "DCP") else counted.median(name, key)

    rows = counted.table(f"{part}a copy takes {copy_s:.4f} s", "way", {
        "stall / copy": lambda name: counted.ratio(name, "copy", "stall_s"),
        "first stall / copy": lambda name: found.turns[name][0]["stall_s"] / copy_s,
        "stall s": lambda name: counted.median(name, "stall_s"),
        "durable after s": lambda name: "-" if name in ("copy", "nothing") else counted.median(name, "durable_s"),
        "step during it": lambda name: during(name, "median"),
        "worst step": lambda name: during(name, "worst"),
    })  # fmt: skip
    ours = {row["way"]: row for row in rows}["Echelon"]
    return rows, [
        at_most(f"{size}: stall, times a copy", 1.3, ours["stall / copy"]),
        at_most(
            f"{size}: worst step during the write, times the worst of as many steps without it",
            1.1,
            counted.ratio("Echelon", "nothing", "worst"),
        ),
    ]


def main() -> None:
    made = parser("checkpoint", __doc__, "100 MB, 2 rounds: under a minute", "without it 5, or 2 if --quick")
    made.add_argument("--size", choices=LAYERS, help="of the state; without it both")
    made.add_argument("--threads", type=positive, default=1, help="of torch, for a step; without it 1")
    args = made.parse_args()
    keep_memory()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for DCP's async_save
    with Report(args.json, ("torch", "numpy")) as report:
        for size in [args.size] if args.size else ["100MB"] if args.quick else LAYERS:
            report.add(*measure(size, args.threads, args.rounds or (2 if args.quick else 5)))
    dist.destroy_process_group()


if __name__ == "__main__":
    command(main)
