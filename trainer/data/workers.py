"""Starts data workers. They are forked from a process with threads, so they may hang as they start."""

import ctypes
import itertools
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.resource_sharer import DupFd
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from trainer import timeouts
from trainer.errors import ConfigError, exhausted
from trainer.log import log
from trainer.process.environment import raise_file_limit
from trainer.process.signals import ignore_stop_signals

FREE_FILES = 16  # file descriptors that a worker needs for tensors that the rank has not fetched yet
FORK = multiprocessing.get_context("fork")  # regardless of a default that a library may have set

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT, LARGEST = 64 << 20, 32 << 20  # bytes that malloc keeps, and of the largest block that it takes of them

T = TypeVar("T")


def started(start: Callable[[Connection], T], end: Callable[[T], Any]) -> T:
    """Return the result of `start` once its forked processes run. Each calls `begin` with its connection.

    A forked process may wait forever for a lock that another thread held during the fork, such as the one of the
    interpreter's thread states. Such processes are restarted (python/cpython#112275: before 3.10.15 and 3.11.10).
    """
    while True:
        ready, child_end = FORK.Pipe(duplex=False)
        processes = start(child_end)
        child_end.close()
        if ready.poll(timeouts.FORK_S):  # true at the end of the pipe: all processes have closed it, or died
            with suppress(EOFError):
                limit = ready.recv()
                end(processes)
                raise ConfigError(f"data.workers: {limit}")
            return processes
        log.warning(
            "data workers did not start in %g s, as a fork with threads running may hang; retrying", timeouts.FORK_S
        )
        end(processes)


def begin(ready: Connection) -> None:
    ignore_stop_signals()
    ready.close()


def keep_memory() -> None:
    """Let malloc keep what is freed, here and in processes that are forked later.

    Otherwise it gives the memory of each sample and batch back, and the kernel clears the memory of the next one. These
    are the values that glibc itself reaches after large blocks were freed.
    """
    with suppress(AttributeError, OSError, TypeError):  # a C library other than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(TRIM_THRESHOLD, KEPT)
        mallopt(MMAP_THRESHOLD, LARGEST)


def begin_worker(ready: Connection, init: Callable[[int], object], worker: int) -> None:
    """Begin, or report a limit of files or threads that is too low, because the rank would wait for batches in vain."""
    try:
        for descriptor in [os.dup(0) for _ in range(FREE_FILES)]:
            os.close(descriptor)
        DupFd(0)  # starts the thread that sends the descriptors of tensors
        trial = threading.Thread(target=time.sleep, args=(1.0,), daemon=True)  # for the thread that sends batches
        trial.start()
    except (OSError, RuntimeError) as error:
        ready.send(exhausted(error) or str(error))
        time.sleep(timeouts.FORK_S)  # until the rank kills this process
    begin(ready)
    init(worker)


def start_workers(
    loader: Callable[..., DataLoader[Any]], refs: Iterator[Any], init: Callable[[int], object] = lambda worker: None
) -> Iterator[Any]:
    """Return a DataLoader's batches once all of its workers run. Each calls `init` with its number."""
    raise_file_limit()
    keep_memory()

    def start(ready: Connection) -> Any:
        nonlocal refs
        refs, given = itertools.tee(refs)  # the workers take some at once, which a restart needs again
        before = set(multiprocessing.active_children())
        worker_init = partial(begin_worker, ready, init)
        try:
            batches: Any = iter(loader(sampler=given, multiprocessing_context=FORK, worker_init_fn=worker_init))
        except BaseException:
            for worker in set(multiprocessing.active_children()) - before:
                with suppress(RuntimeError):  # torch raises when a worker is killed
                    worker.kill()  # it ignores SIGTERM, and would be joined at exit
                    worker.join()
            raise
        for worker in batches._workers:
            worker._popen.terminate = worker._popen.kill  # for torch, and at exit
        return batches

    return started(start, kill_workers)


def kill_workers(batches: Any) -> None:
    """Kill a DataLoader's workers, because those that lack files or threads would print tracebacks when they exit."""
    torch._C._remove_worker_pids(id(batches))  # pyright: ignore[reportAttributeAccessIssue] torch would raise for them
    batches._worker_pids_set = False
    for worker in batches._workers:
        worker.kill()
    batches._shutdown_workers()


def lost_batches(error: Exception, batches: Any, timeout_s: float) -> str:
    """Explain why workers sent no more batches, and how to fix it; "" for any other error."""
    if isinstance(error, FileNotFoundError) and error.filename is None and hasattr(batches, "_workers"):  # a socket
        kill_workers(batches)
        return (
            f"TMPDIR={tempfile.gettempdir()}: a data worker's folder was removed; exclude echelon-* from clean-ups, "
            "then trainer.resume=auto continues from the last checkpoint"
        )
    if "DataLoader timed out" in str(error):
        return (
            f"trainer.timeout_s={timeout_s:g}: a data worker gave no batch in this time; find the file, data() or "
            "transform() of the recipe that hangs, or raise trainer.timeout_s"
        )
    return ""
