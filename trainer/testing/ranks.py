"""Runs a function on several real processes that talk through gloo."""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from trainer.process.environment import Place
from trainer.process.exit import die_with_parent


def run_ranks(world: int, function: Callable[[Place, Path], Any], timeout_s: float) -> list[Any]:
    """Run `function(place, folder)` on `world` processes that are forked from this one; return the results.

    All have the same new folder, which is gone afterwards, with all that they print.

    Raises:
        AssertionError: A rank failed, or took too long. The message has its error.
    """
    context: Any = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder, ranks = Path(name), []
        try:
            for rank in range(world):
                ours, theirs = context.Pipe(duplex=False)
                place = Place(rank, world, rank, world, f"{folder}/store", "test") if world > 1 else Place()
                process = context.Process(target=_run, args=(theirs, function, place, folder), daemon=True)
                process.start()
                theirs.close()
                ranks.append((process, ours))
            return _collect([pipe for _, pipe in ranks], time.monotonic() + timeout_s, timeout_s)
        finally:
            for process, pipe in ranks:
                pipe.close()
                process.kill()
                process.join()


def _collect(pipes: list[Connection], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [rank for rank in range(len(pipes)) if rank not in results]
        ready = wait([pipes[rank] for rank in waiting], max(0.0, deadline - time.monotonic()))
        assert ready, f"rank {waiting[0]} of {len(pipes)} did not end in {timeout_s:.0f} s"
        for rank in (rank for rank in waiting if pipes[rank] in ready):
            try:
                failed, results[rank] = pipes[rank].recv()
            except EOFError:
                failed, results[rank] = True, "the process died"
            assert not failed, f"rank {rank} of {len(pipes)}: {results[rank]}"
    return [results[rank] for rank in range(len(pipes))]


def _run(pipe: Connection, function: Callable[[Place, Path], Any], place: Place, folder: Path) -> None:
    die_with_parent()
    import torch

    torch.set_num_threads(1)  # the threads of the process that was forked are not here
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.chdir(folder)
    log = os.open(folder / f"output-{place.rank}", os.O_CREAT | os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(log, "w")  # pytest has put others there
    try:
        pipe.send((False, function(place, folder)))
    except BaseException as error:
        pipe.send((True, "".join(traceback.format_exception(error)).rstrip()))
    os._exit(0)
