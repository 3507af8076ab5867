"""Runs training loops in turns in one process, and times their steps.

Every loop has a thread of its own. A turn is a block of steps of one loop; a round is one turn of each loop. The order
of the loops is reversed after every round, so a machine that slows down slows down all loops. Neither the set-up nor
the end of a run is timed.
"""

import contextlib
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from scripts.bench.overhead.loops import LOG_EVERY, Task
from trainer.parallel.warmup import wait

Train = Callable[..., None]


class Turns(threading.Thread):
    """A loop, and the batches that it trains on.

    In a turn the loop takes `warm` batches. The batches after them, up to the next multiple of the log interval, are
    timed. One logged step is always among these.
    """

    def __init__(self, train: Train, task: Task, rounds: int, warm: int, folder: Path) -> None:
        super().__init__(daemon=True)
        torch.manual_seed(0)
        pin = task.device.type == "cuda"
        self.pool = [(x.pin_memory(), y.pin_memory()) if pin else (x, y) for x, y in (task.batch() for _ in range(64))]
        self.device = task.device
        self.rounds, self.warm, self.timed = rounds, warm, LOG_EVERY - warm % LOG_EVERY
        self.train = partial(train, task, self, rounds * (self.warm + self.timed) + 1, folder)
        self.wall_us: list[float] = []  # of a step, one value a round
        self.cpu_us: list[float] = []  # of this thread
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

    def turn(self) -> None:
        self.go.release()
        self.done.acquire()
        if self.error is not None:
            raise self.error

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.rounds):
            self._wait()
            yield from self._batches(self.warm)
            wait(self.device)
            wall, cpu = time.perf_counter(), time.thread_time()
            yield from self._batches(self.timed)
            self.cpu_us.append((time.thread_time() - cpu) / self.timed * 1e6)
            wait(self.device)  # after the CPU time is read, because a waiting thread spins
            self.wall_us.append((time.perf_counter() - wall) / self.timed * 1e6)
        self._wait()
        yield from self._batches(4)  # the last step, and the batches that a loop prefetches

    def _wait(self) -> None:
        self.done.release()
        self.go.acquire()

    def _batches(self, n: int) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.pool[i % len(self.pool)] for i in range(n))


def measure(trains: dict[str, Train], task: Task, rounds: int, warm: int) -> dict[str, Turns]:
    """Time all loops, in turns, in this process."""
    with tempfile.TemporaryDirectory() as folder, silence():
        runs = {name: Turns(train, task, rounds, warm, Path(folder, name)) for name, train in trains.items()}
        backwards = list(runs.values())[::-1]
        for n in range(rounds):
            for run in backwards if n % 2 else runs.values():
                run.turn()
        for run in backwards:  # the loop that started the process group ends last
            run.turn()
            run.join()
    return runs


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Discard the loops' output. Printing stays part of their cost."""
    with contextlib.ExitStack() as stack:
        null = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(null))
        stack.enter_context(contextlib.redirect_stderr(null))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield
