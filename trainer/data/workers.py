"""Starts data workers. They are forked from a rank with threads, so they may hang at their start."""

import io
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
from multiprocessing.reduction import ForkingPickler
from multiprocessing.resource_sharer import DupFd
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from trainer import timeouts
from trainer.errors import ConfigError, exhausted
from trainer.log import log
from trainer.process.environment import raise_file_limit
from trainer.process.signals import ignore_stop_signals

FREE = 16  # file descriptors that a worker needs for tensors that the rank has not fetched yet
FORK = multiprocessing.get_context("fork")  # regardless of a default that a library may have set

T = TypeVar("T")


def started(start: Callable[[Connection], T], end: Callable[[T], Any]) -> T:
    """Return the result of `start` once its forked processes run. Each calls `begin` with its connection.

    A forked process may wait forever for a lock that another thread held during the fork, such as the one of the
    interpreter's thread states. Such processes are restarted (python/cpython#112275: before 3.10.15 and 3.11.10).
    """
    while True:
        ready, given = FORK.Pipe(duplex=False)
        made = start(given)
        given.close()
        if ready.poll(timeouts.FORK_S):  # true at the end of the pipe: all processes have closed it, or died
            with suppress(EOFError):
                limit = ready.recv()
                end(made)
                raise ConfigError(f"data.workers: {limit}")
            return made
        log.warning(
            "data workers did not start in %g s, as a fork with threads running may hang; retrying", timeouts.FORK_S
        )
        end(made)


def begin(given: Connection, _: int = 0) -> None:
    ignore_stop_signals()
    given.close()


def begin_worker(given: Connection, init: Callable[[int], object], worker: int) -> None:
    """Begin, or report that a limit of files or threads is too low, because the rank would wait for batches in vain."""
    try:
        for descriptor in [os.dup(0) for _ in range(FREE)]:
            os.close(descriptor)
        DupFd(0)  # starts the thread that sends the descriptors of tensors
        threading.Thread(
            target=time.sleep, args=(1.0,), daemon=True
        ).start()  # as a test for the thread that sends batches
    except (OSError, RuntimeError) as error:
        given.send(exhausted(error) or str(error))
        time.sleep(timeouts.FORK_S)  # until the rank kills this process
    begin(given)
    init(worker)


def start_workers(
    loader: Callable[..., DataLoader[Any]], refs: Iterator[Any], init: Callable[[int], object] = lambda worker: None
) -> Iterator[Any]:
    """Return a DataLoader's batches once all of its workers run.

    Args:
        init: Called in each worker with its number.
    """
    raise_file_limit()

    def start(given: Connection) -> Any:
        nonlocal refs
        refs, ahead = itertools.tee(refs)  # the workers take some at once, which a restart needs again
        before = set(multiprocessing.active_children())
        first = partial(begin_worker, given, init)
        try:
            batches: Any = iter(loader(sampler=ahead, multiprocessing_context=FORK, worker_init_fn=first))
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


class Sent(ForkingPickler):
    """Pickles everything except the values of tensors and arrays, which workers send separately."""

    def persistent_id(self, obj: Any) -> str | None:
        if isinstance(obj, Tensor) and obj.requires_grad and not obj.is_leaf:
            raise TypeError("a tensor has a graph: detach() it")
        return "tensor" if isinstance(obj, Tensor | np.ndarray) else None


def refuse_unsendable(batch: Any) -> None:
    """Refuse a batch that a data worker can't send: its queue would drop it, and the rank would wait for it.

    Raises:
        ConfigError: Part of the batch can't be pickled.
    """
    if get_worker_info() is None:
        return
    try:
        Sent(io.BytesIO()).dump(batch)
    except Exception as error:  # of any class: the objects' own code runs
        raise ConfigError(
            f"data.workers: a worker can't send the batch ({type(error).__name__}: {error}); let transform() or "
            "collate() return tensors, numbers and texts, or give data.workers=0"
        ) from None


def kill_workers(batches: Any) -> None:
    """Kill the workers behind `batches`, because workers that lack files or threads print tracebacks when they exit."""
    torch._C._remove_worker_pids(id(batches))  # pyright: ignore[reportAttributeAccessIssue] torch would raise for them
    batches._worker_pids_set = False
    for worker in batches._workers:
        worker.kill()
    batches._shutdown_workers()


def lost_batches(error: Exception, batches: Any, timeout_s: float) -> str:
    """Explain why workers sent no more batches, and how to fix it; empty for any other error."""
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
