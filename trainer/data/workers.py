"""Data workers: processes that are forked beside the threads of a rank, and so may not start."""

import itertools
import os
import select
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from trainer.run import log
from trainer.signals import start_worker

START_S = 30.0  # until a process that was forked runs Python code


def start_workers(loader: Callable[..., DataLoader[Any]], plan: Iterator[Any]) -> Iterator[Any]:
    """A DataLoader's batches, once all of its workers run.

    A process that is forked while another thread has a lock may wait for it for ever: one of gloo's threads that of the
    interpreter's thread states (python/cpython#112275: before 3.10.15 and 3.11.10). Such workers are started again.
    """
    while True:
        plan, ahead = itertools.tee(plan)  # some of which the workers are given at once
        read, write = os.pipe()
        batches: Any = iter(loader(sampler=ahead, worker_init_fn=partial(begin_worker, write)))
        for worker in batches._workers:
            worker._popen.terminate = worker._popen.kill  # for torch, and at exit: it does not heed SIGTERM
        os.close(write)
        with open(read, "rb", buffering=0) as started:
            while (ready := select.select([started], [], [], START_S)[0]) and started.read(1):
                pass  # a byte of each worker; at the end all have closed their ends, or died, which torch tells of
        if ready:
            return batches
        log.warning("data workers did not start in %g s, as beside threads a fork may fail; starting again", START_S)
        del batches  # which kills them


def begin_worker(started: int, _: int) -> None:
    start_worker()
    os.write(started, b".")
    os.close(started)
