"""Downloads remote shards ahead of their use in a process alongside the data workers."""

import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

from trainer import timeouts
from trainer.data.batch import Split
from trainer.data.remote.shard import Remote
from trainer.data.sampling.mixture import Mixture
from trainer.data.sampling.order import Order, Refs
from trainer.data.workers import FORK, begin, started
from trainer.errors import ConfigError, DataError, UnavailableError

DOWNLOADS = 4  # simultaneous downloads per rank
FAR = 10_000  # steps, or micro-batches of a validation, to look ahead at most
Needs = Callable[[], Iterator[set[int]]]  # yields the shards of each step, or of each micro-batch of a validation


@contextlib.contextmanager
def fetching(remote: Mapping[int, Remote], needs: Needs, lanes: int, ranks: int) -> Iterator[Callable[[], None]]:
    """Download each lane's shard and its next one in a process, if the folder has room for both.

    The caller calls the result after each step, or each micro-batch of a validation. A thread would slow the
    interpreter down, and workers forked meanwhile would inherit its locks. It would also consume the transforms' random
    numbers, because drivers draw some for their pauses. Failures are left to the readers of the shards, which raise
    them.

    Args:
        remote: Shard number -> remote shard.
        ranks: Number of ranks that share the folder, each of which uses an equal part.
    """
    if not remote:
        yield lambda: None
        return
    done: Any = FORK.RawValue("q")

    def start(ready: Connection) -> ForkProcess:
        process = FORK.Process(target=fetch, args=(ready, remote, needs, lanes, ranks, done), daemon=True)
        process.start()
        return process

    def end(process: ForkProcess) -> None:
        process.kill()  # the next download removes its partial files
        process.join()

    def count_done() -> None:
        done.value += 1

    process = started(start, end)
    try:
        yield count_done
    finally:
        end(process)


def fetch(ready: Connection, remote: Mapping[int, Remote], needs: Needs, lanes: int, ranks: int, done: Any) -> None:
    begin(ready)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # multiprocessing sends SIGTERM when the rank ends
    logging.disable()
    sizes, room = {number: path.bytes for number, path in remote.items()}, next(iter(remote.values())).most // ranks
    window = Window(needs(), sizes, 2 * lanes + DOWNLOADS, room)
    pool, requested = ThreadPoolExecutor(DOWNLOADS), set[int]()
    parent = multiprocessing.parent_process()

    def request(number: int) -> None:
        if number not in requested:
            requested.add(number)
            pool.submit(download, number)

    def download(number: int) -> None:
        try:
            if number in window.last:  # it is still needed
                remote[number].fetch()
        except (ConfigError, DataError, UnavailableError):
            time.sleep(timeouts.AGAIN_S)
        finally:
            requested.remove(number)

    while parent and parent.is_alive():
        for number in window.move(done.value):
            request(number)
        now = time.time_ns()
        for place, number in enumerate(window.last):
            used = now - place  # so that the shard that is needed last is evicted first
            try:
                os.utime(remote[number].file, ns=(used, now), follow_symlinks=False)
            except OSError:  # the shard is not there, or is another user's
                request(number)
        time.sleep(timeouts.LOOK_S)


class Window:
    """The shards of the next micro-batches.

    Args:
        needs: The shards of each micro-batch, in order.
        sizes: Shard -> bytes. Other shards are ignored.
        most: Number of shards at which the window stops growing.
        room: Total bytes of the shards. If the next micro-batch alone needs more, the window is empty.
    """

    def __init__(self, needs: Iterator[set[int]], sizes: Mapping[int, int], most: int, room: int) -> None:
        self.needs, self.sizes, self.most, self.room = enumerate(needs), sizes, most, room
        self.next = next(self.needs, None)  # the first micro-batch after the window
        self.last: dict[int, int] = {}  # shard -> the last micro-batch in the window that needs it

    def move(self, done: int) -> Iterator[int]:
        """Drop the micro-batches before `done`, and yield the shards that enter the window."""
        for shard in [shard for shard, last in self.last.items() if last < done]:
            del self.last[shard]
        while self.next and len(self.last) < self.most and (number := self.next[0]) < done + FAR:
            shards = self.next[1] & self.sizes.keys() if number >= done else set[int]()
            if sum(self.sizes[shard] for shard in shards | self.last.keys()) > self.room:
                return
            new = sorted(shards - self.last.keys())
            self.last |= dict.fromkeys(shards, number)
            yield from new
            self.next = next(self.needs, None)


def training_needs(order: Order | Mixture, steps: Iterable[tuple[int, Split]], rank: int) -> Iterator[set[int]]:
    """Yield the shards of each step. Micro-batches are not counted, because their number in a step may change."""
    for start, split in steps:
        yield order.shards(start, start + split.samples, rank, split.shares)


def validation_needs(parts: Callable[[], Iterable[Refs]]) -> Iterator[set[int]]:
    return (set(refs.rows[:, 1].tolist()) for refs in parts())
