"""Measures what a checkpoint costs training: the stall of the loop, the steps beside the writer, the time to durable.

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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from scripts.bench.report import Goal, Row, at_most, median_ratio, parser, positive, print_machine, report
from scripts.command import command
from trainer.callback import Callback
from trainer.checkpointing import Checkpointer
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.process.environment import Place
from trainer.trainer import Trainer

WIDTH = 2048
LAYERS = {"100MB": 2, "2GB": 40}  # of WIDTH x WIDTH float32, with two moments each
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
BEFORE, AFTER = 5, 2  # steps of a turn before the save, and after it is durable
Done = Callable[[], bool]


class Wide:
    """A stack of square layers, on random numbers."""

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(self.layers)))

    def data(self, split: str) -> Any:
        return [{"x": torch.randn(4, WIDTH)} for _ in range(64)] if split == "train" else None

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).square().mean()


class Way:
    """A way to save. `begin` returns when training may continue, with a function that tells whether all is done."""

    checkpointer: Checkpointer

    def __init__(self, folder: Path) -> None:
        self.folder, self.thread = folder, ThreadPoolExecutor(1)

    def begin(self, trainer: Trainer) -> Done:
        raise NotImplementedError

    def synced(self, written: Future[Any] | None) -> Done:
        """Sync the files in a thread, after `written` is complete."""

        def sync() -> None:
            if written is not None:
                written.result()
            for path in [*sorted(self.folder.rglob("*")), self.folder]:
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

        return self.thread.submit(sync).done

    def states(self, trainer: Trainer) -> dict[str, Any]:
        return {"model": trainer.module.state_dict(), "optimizer": trainer.optimizer.state_dict()}

    def clean(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)


class Copy(Way):
    """Copies the state into allocated memory, the base of all ratios."""

    buffers: list[Tensor] | None = None

    def begin(self, trainer: Trainer) -> Done:
        tensors = [t.detach() for section in self.checkpointer.collect().common.values() for t in leaves(section)]
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


class TorchSave(Way):
    def begin(self, trainer: Trainer) -> Done:
        torch.save(self.states(trainer), self.folder / "state.pt")
        return self.synced(None)


class DCP(Way):
    def begin(self, trainer: Trainer) -> Done:
        dcp.save(self.states(trainer), checkpoint_id=self.folder, no_dist=True)
        return self.synced(None)


class AsyncDCP(Way):
    kind = AsyncCheckpointerType.THREAD

    def begin(self, trainer: Trainer) -> Done:
        written = dcp.async_save(self.states(trainer), checkpoint_id=self.folder, async_checkpointer_type=self.kind)
        assert isinstance(written, Future)
        return self.synced(written)


class ProcessDCP(AsyncDCP):
    kind = AsyncCheckpointerType.PROCESS


WAYS: dict[str, type[Way]] = {
    "copy": Copy,
    "nothing": Nothing,
    "Echelon": Echelon,
    "torch.save": TorchSave,
    "DCP": DCP,
    "DCP async, thread": AsyncDCP,
    "DCP async, process": ProcessDCP,
}


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value.values() for t in leaves(item)] if isinstance(value, dict) else []


class Turns(Callback):
    """Times each step, and saves in one way after the other. `turns` maps a way's name to its measured turns."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.ways = {name: way(folder / str(i)) for i, (name, way) in enumerate(WAYS.items())}
        self.turns: dict[str, list[Row]] = {name: [] for name in WAYS}
        order = [list(WAYS)[:: -1 if n % 2 else 1] for n in range(rounds + 1)]  # the first round allocates buffers
        self.queue = [name for names in order for name in names]
        self.before: list[float] = []
        self.beside: list[float] = []
        self.done: Done | None = None
        self.ended = time.perf_counter()

    def on_step_end(self, trainer: Any) -> None:
        now = time.perf_counter()
        seconds = now - self.ended
        if self.done is None:
            self.before.append(seconds)
            if len(self.before) > BEFORE:
                self.begin(trainer)
        else:
            if self.durable_s is None:
                self.beside.append(seconds)
                if self.done():
                    self.durable_s = now - self.began
            else:
                self.left -= 1
            if self.durable_s is not None and self.left <= 0:
                self.end(trainer)
        self.ended = time.perf_counter()

    def begin(self, trainer: Trainer) -> None:
        way = self.ways[self.queue[0]]
        way.clean()
        self.began = time.perf_counter()
        self.done = way.begin(trainer)
        self.stall_s = getattr(way, "seconds", time.perf_counter() - self.began)
        self.durable_s: float | None = None
        self.beside, self.left = [], AFTER

    def end(self, trainer: Trainer) -> None:
        median_s = statistics.median(self.before[1:])
        turn = {
            "stall_s": self.stall_s,
            "durable_s": self.durable_s,
            "steps": len(self.beside),
            "median": statistics.median(self.beside) / median_s,
            "worst": max(self.beside) / median_s,
            "step_s": median_s,
        }
        name = self.queue.pop(0)
        self.turns[name].append(turn)
        if name == "Echelon":
            Nothing.steps = len(self.beside)
        self.before, self.done = [], None
        print(name, {key: round(value, 4) for key, value in turn.items()}, flush=True)
        if not self.queue:
            trainer.stop("max_steps")


def keep_memory() -> None:
    """Let the process keep the memory that it frees.

    Otherwise each step gets the pages of its gradients anew from the kernel. The number of pages differs from step to
    step, and costs more time than a writer beside the steps.
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
            checkpoint = CheckpointOptions(every_steps=None, every_minutes=None)
            options = Options(devices=1, max_steps=10**6, run_dir="run", checkpoint=checkpoint, log_every_steps=10**6)
            trainer = Trainer(
                Wide(LAYERS[size]),
                {"turns": turns},
                batch=4,
                options=options,
                data=DataOptions(workers=0),
                place=Place(),
            )
            Way.checkpointer = trainer.loop.checkpointer
            trainer.fit()
        finally:
            os.chdir(here)
    if trainer.stop_reason == "signal":  # which the trainer has handled
        raise SystemExit(128 + signal.Signals[trainer.signals.name])
    return table(turns.turns, size, threads, rounds)


def table(turns: dict[str, list[Row]], size: str, threads: int, rounds: int) -> tuple[list[Row], list[Goal]]:
    counted = {name: seen[1:] for name, seen in turns.items()}
    copies = [turn["stall_s"] for turn in counted["copy"]]

    def median(name: str, key: str) -> float:
        return statistics.median(turn[key] for turn in counted[name])

    part = f"{size} of state, {threads} thread(s), steps of {median('copy', 'step_s'):.3f} s; {rounds} rounds; "
    part += f"a copy takes {statistics.median(copies):.4f} s"
    rows: list[Row] = []
    for name in counted:
        beside = name in ("copy", "torch.save", "DCP")
        rows.append({
            "part": part,
            "way": name,
            "stall / copy": median_ratio([turn["stall_s"] for turn in counted[name]], copies),
            "first stall / copy": turns[name][0]["stall_s"] / statistics.median(copies),
            "stall s": median(name, "stall_s"),
            "durable after s": "-" if name in ("copy", "nothing") else median(name, "durable_s"),
            "step beside it": "-" if beside else median(name, "median"),
            "worst step": "-" if beside else median(name, "worst"),
        })  # fmt: skip
    ours = {row["way"]: row for row in rows}["Echelon"]
    return rows, [
        at_most(f"{size}: stall, times a copy", 1.3, ours["stall / copy"]),
        at_most(f"{size}: worst step beside the writer, times the median before", 1.1, ours["worst step"]),
    ]


def main() -> None:
    made = parser("checkpoint", __doc__, "100 MB, 2 rounds: under a minute", "without it 5, or 2 if --quick")
    made.add_argument("--size", choices=LAYERS, help="of the state; without it both")
    made.add_argument("--threads", type=positive, default=1, help="of torch, for a step; without it 1")
    args = made.parse_args()
    about = print_machine(["torch", "numpy"])
    keep_memory()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for DCP's async_save
    sizes = [args.size] if args.size else ["100MB"] if args.quick else list(LAYERS)
    measured = [measure(size, args.threads, args.rounds or (2 if args.quick else 5)) for size in sizes]
    report([rows for rows, _ in measured], [goal for _, goals in measured for goal in goals], about, args.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    command(main)
