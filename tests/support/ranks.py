"""Runs functions on several real processes that talk through gloo, and brings back what each returns."""

import atexit
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainer.process.environment import Place
from trainer.process.exit import die_with_parent

# Forked when first needed and kept for the session: importing torch takes longer than most tests.
CONTEXT = multiprocessing.get_context("forkserver")
# DDP and torch's optimizers import dynamo, and files of tests pytest.
CONTEXT.set_forkserver_preload(["trainer.trainer", "torch._dynamo", "pytest"])
PEERS: list[tuple[Any, Connection]] = []


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 240) -> list[Any]:
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
            answers = _collect(pipes, time.monotonic() + timeout_s)
        except BaseException:  # a time limit of pytest's too: the ranks are busy with this function
            stop()
            raise
        PEERS[:world] = [peer for peer, (_, left) in zip(PEERS, answers, strict=False) if not left]  # those have ended
        return [value for value, _ in answers]


def _collect(pipes: list[Connection], deadline: float) -> list[tuple[Any, int]]:
    """Return of each rank what the function returned, and the threads that it left behind."""
    results: dict[int, tuple[Any, int]] = {}
    while len(results) < len(pipes):
        waiting = [rank for rank in range(len(pipes)) if rank not in results]
        multiprocessing.connection.wait([pipes[rank] for rank in waiting], max(0.0, deadline - time.monotonic()))
        ready = [rank for rank in waiting if pipes[rank].poll()]
        assert ready, f"ranks {waiting} did not end in time"
        for rank in ready:
            try:
                ok, value, left = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                process, _ = PEERS[rank]
                process.join(5)
                ok, value, left = False, f"died with exit code {process.exitcode}", 0
            assert ok, f"rank {rank}: {value}"
            results[rank] = value, left
    return [results[rank] for rank in range(len(pipes))]


@atexit.register
def stop() -> None:
    peers, PEERS[:] = list(PEERS), []
    for process, pipe in peers:
        pipe.close()
        process.kill()
        process.join()


def _serve(pipe: Connection) -> None:
    die_with_parent()
    multiprocessing.set_start_method("fork", force=True)  # of data workers, as in a process that nobody spawned
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import numpy as np
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.set_threshold(50_000, 20, 20)
    np.random.seed()  # else all ranks would draw the same
    modules = 0
    while True:
        folder, function, place, args = pipe.recv()
        os.chdir(folder)
        if len(sys.modules) != modules:
            gc.freeze()  # modules: each run collects garbage, and would go through all of torch
            modules = len(sys.modules)
        try:
            ok, value = True, function(place, *args)
        except BaseException:
            ok, value = False, traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
        left = groups_left(2)  # as after an exception in a backward pass: each thread wakes 100 times a second for ever
        pipe.send_bytes(pickle.dumps((ok, value, left)))  # whole: torch would share memory of a process that may end
        if left:
            return
        os.chdir(Path(folder).anchor)


def groups_left(seconds: float = 20) -> int:
    """Count the threads of gloo that a collection of garbage leaves to this process."""
    deadline = time.monotonic() + seconds  # a thread ends soon after its group, unless the machine is busy
    gc.collect()
    while (left := sum("gloo" in name for name in _threads())) and time.monotonic() < deadline:
        time.sleep(0.05)
        gc.collect()  # another thread may have held the group a moment ago
    return left


def _threads() -> Iterator[str]:
    for comm in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended meanwhile
            yield comm.read_text()
