"""Runs functions on several real processes that talk through gloo, and brings back what each returns."""

import atexit
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainer.process.environment import Place
from trainer.process.exit import die_with_parent

# Forked when first needed and kept for the session: importing torch takes longer than most tests.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["trainer.trainer", "torch._dynamo"])  # DDP and torch's optimizers import the latter
PEERS: list[tuple[Any, Connection]] = []


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60) -> list[Any]:
    """`function(place, *args)` on `world` ranks in the caller's current folder; what each returned.

    Raises:
        AssertionError: with the traceback of the first rank that failed, or where one took longer than `timeout_s`.
    """
    while len(PEERS) < world:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_serve, args=(theirs,))
        process.start()
        theirs.close()
        PEERS.append((process, ours))
    with tempfile.TemporaryDirectory() as folder:
        pipes = [pipe for _, pipe in PEERS[:world]]
        for rank, pipe in enumerate(pipes):
            place = Place(rank, world, rank, world, f"{folder}/store", "test") if world > 1 else Place()
            pipe.send((os.getcwd(), function, place, args))
        try:
            return _collect(pipes, time.monotonic() + timeout_s)
        except AssertionError:
            stop()
            raise


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [rank for rank in range(len(pipes)) if rank not in results]
        multiprocessing.connection.wait([pipes[rank] for rank in waiting], max(0.0, deadline - time.monotonic()))
        ready = [rank for rank in waiting if pipes[rank].poll()]
        assert ready, f"ranks {waiting} did not end in time"
        for rank in ready:
            try:
                ok, value = pipes[rank].recv()
            except EOFError:
                ok, value = False, "died"
            assert ok, f"rank {rank}: {value}"
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


@atexit.register
def stop() -> None:
    for process, pipe in PEERS:
        pipe.close()
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
    PEERS.clear()


def _serve(pipe: Connection) -> None:
    die_with_parent()
    multiprocessing.set_start_method("fork", force=True)  # of data workers, as in a process that nobody spawned
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import numpy as np
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    np.random.seed()  # else all ranks would draw the same
    modules = 0
    while True:
        folder, function, place, args = pipe.recv()
        os.chdir(folder)
        if len(sys.modules) != modules:
            gc.freeze()  # modules: each run collects garbage, and would go through all of torch
            modules = len(sys.modules)
        try:
            pipe.send((True, function(place, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        if dist.is_initialized():
            dist.destroy_process_group()
        os.chdir(Path(folder).anchor)
