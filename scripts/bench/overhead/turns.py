"""Runs training loops in turns in one process, and times their steps.

Every loop has a thread of its own. A turn is a block of steps of one loop; a round is one turn of each loop. The order
of the loops is reversed after every round, so a machine that slows down slows down all loops. Neither the set-up nor
the end of a run is timed.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from scripts.bench.harness import Rounds, Turn, silence
from scripts.bench.trainers import CPU, LOG_EVERY, Batch, Job
from trainer.optim.factories import adamw, sgd
from trainer.optim.groups import Groups
from trainer.parallel.warmup import wait


@dataclass(frozen=True)
class Task:
    """A model that is trained with cross-entropy, as a recipe."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    samples: int  # in a batch
    optimizer: Callable[[Groups], Optimizer]
    device: torch.device = CPU
    batches: Iterable[Batch] = ()

    def data(self, split: str) -> Iterable[Batch] | None:
        return self.batches if split == "train" else None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(batch["x"]), batch["labels"])

    def job(self, batches: Iterable[Batch], steps: int, folder: Path) -> Job:
        recipe = replace(self, batches=batches)
        return Job(recipe, lambda: batches, self.samples, steps, folder, self.optimizer, self.device)


MLP = Task(
    model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    batch=lambda: {"x": torch.randn(32, 64), "labels": torch.randint(10, (32,))},
    samples=32,
    optimizer=partial(sgd, momentum=0.0),
)

# About 15 ms a step on one core.
TRANSFORMER = Task(
    model=lambda: nn.Sequential(
        *(nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(4)),
        nn.Flatten(0, 1),
        nn.Linear(64, 100),
    ),
    batch=lambda: {"x": torch.randn(8, 64, 64), "labels": torch.randint(100, (512,))},
    samples=8,
    optimizer=adamw,
)
Train = Callable[[Job], None]


class Loop(threading.Thread):
    """A loop, and the batches that it trains on.

    In a turn the loop takes `warm` batches. The batches after them, up to the next multiple of the log interval, are
    timed. One logged step is always among these.
    """

    def __init__(self, train: Train, task: Task, rounds: int, warm: int, folder: Path) -> None:
        super().__init__(daemon=True)
        torch.manual_seed(0)
        pool = [task.batch() for _ in range(64)]
        pin = task.device.type == "cuda"
        self.pool = [{key: x.pin_memory() for key, x in batch.items()} for batch in pool] if pin else pool
        self.device = task.device
        self.rounds, self.warm, self.timed = rounds, warm, LOG_EVERY - warm % LOG_EVERY
        self.train = partial(train, task.job(self, rounds * (self.warm + self.timed) + 1, folder))
        self.taken: dict[str, float] = {}  # by the last turn
        self.error: Exception | None = None
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.start()
        self.turn()  # set-up

    def run(self) -> None:
        self.go.acquire()
        torch.set_num_threads(1)  # holds for the calling thread, as does the device
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        try:
            self.train()
        except Exception as error:
            self.error = error
        self.done.release()

    def turn(self) -> Turn:
        self.go.release()
        self.done.acquire()
        if self.error is not None:
            raise self.error
        return self.taken

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.rounds):
            self._wait()
            yield from self._batches(self.warm)
            wait(self.device)
            wall, cpu = time.perf_counter(), time.thread_time()
            yield from self._batches(self.timed)
            cpu = time.thread_time() - cpu
            wait(self.device)  # after the CPU time is read, because a waiting thread spins
            wall = time.perf_counter() - wall
            self.taken = {"us": wall / self.timed * 1e6, "cpu": cpu / self.timed * 1e6}
        self._wait()
        yield from self._batches(4)  # the last step, and the batches that a loop prefetches

    def _wait(self) -> None:
        self.done.release()
        self.go.acquire()

    def _batches(self, n: int) -> Iterator[Batch]:
        return (self.pool[i % len(self.pool)] for i in range(n))


def measure(trains: dict[str, Train], task: Task, rounds: int, warm: int) -> Rounds:
    """Time all loops, in turns, in this process. A turn has the microseconds of a step: `us`, and of the CPU `cpu`."""
    with tempfile.TemporaryDirectory() as folder, silence():
        loops = {name: Loop(train, task, rounds, warm, Path(folder, name)) for name, train in trains.items()}
        found = Rounds.of(loops).run(rounds, lambda name: loops[name].turn())
        for loop in [*loops.values()][::-1]:  # the loop that started the process group ends last
            loop.turn()
            loop.join()
    return found
