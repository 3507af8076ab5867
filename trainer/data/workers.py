"""Data workers: processes that are forked beside the threads of a rank, and so may not start."""

import itertools
import multiprocessing
import resource
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from trainer.log import log
from trainer.process.signals import ignore_stop_signals

START_S = 30.0  # until processes that were forked run Python code
FILES = 1 << 16  # that may be open, where the system's hard limit allows it
FORK = multiprocessing.get_context("fork")  # they have what the rank has, whatever a library has set

T = TypeVar("T")


def started(start: Callable[[Connection], T], end: Callable[[T], Any]) -> T:
    """Return the result of `start` once its forked processes run. Each calls `begin` with its connection.

    A forked process may wait for ever for a lock that another thread had: one of gloo's threads, the lock of the
    interpreter's thread states. Such processes are started again (python/cpython#112275: before 3.10.15 and 3.11.10).
    """
    while True:
        ready, given = FORK.Pipe(duplex=False)
        made = start(given)
        given.close()
        if ready.poll(START_S):  # at its end: all have closed theirs, or died
            return made
        log.warning("data workers did not start in %g s, as beside threads a fork may fail; starting again", START_S)
        end(made)


def begin(given: Connection, _: int = 0) -> None:
    ignore_stop_signals()
    given.close()


def start_workers(loader: Callable[..., DataLoader[Any]], refs: Iterator[Any]) -> Iterator[Any]:
    """Return a DataLoader's batches, once all of its workers run."""
    raise_file_limit()

    def start(given: Connection) -> Any:
        nonlocal refs
        refs, ahead = itertools.tee(refs)  # some of which the workers are given at once
        batches: Any = iter(loader(sampler=ahead, multiprocessing_context=FORK, worker_init_fn=partial(begin, given)))
        for worker in batches._workers:
            worker._popen.terminate = worker._popen.kill  # for torch, and at exit: it does not heed SIGTERM
        return batches

    return started(start, lambda batches: batches._shutdown_workers())


def kill_workers(batches: Any) -> None:
    """Kill the workers behind `batches`: those whose folder is gone would print tracebacks at their end."""
    for worker in batches._workers:
        worker.kill()
        worker.join()


def raise_file_limit() -> None:
    """Let this process and its workers open more files: torch has one open for each tensor that lies ready."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
