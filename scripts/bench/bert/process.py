"""Measures each cell in a process of its own, so that an error of memory, a crash or a hang ends that cell alone."""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from scripts.bench.bert.cells import Cell
from trainer.errors import ConfigError, is_out_of_memory

CONTEXT = multiprocessing.get_context("forkserver")
LOADED = ["scripts.bench.bert.measure", "torch._dynamo"]  # not transformers: with torchao it opens the GPU
END_S = 5  # until a process that has answered is killed


class Outcome(NamedTuple):
    """The numbers of a cell, or the reason why there are none."""

    found: dict[str, float]
    reason: str = ""
    failed: bool = False  # by an error that nobody expects


def run_cell(cell: Cell, limit_s: float) -> Outcome:
    """Measure a cell in a new process, which is killed at the limit with all that it has started."""
    CONTEXT.set_forkserver_preload(LOADED)
    ours, theirs = CONTEXT.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = CONTEXT.Process(target=serve, args=(cell, folder, theirs))
        process.start()
        theirs.close()
        try:
            outcome = ours.recv() if ours.poll(limit_s) else Outcome({}, f"no result in {limit_s:.0f} s")
            process.join(END_S if outcome.found else 0)
            return outcome
        except EOFError:
            process.join()
            return Outcome({}, f"the process ended with code {process.exitcode}", failed=True)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
            process.join()
            ours.close()


def serve(cell: Cell, folder: str, answer: Connection) -> None:
    """Measure the cell and send the outcome."""
    os.setsid()
    os.chdir(folder)
    log = os.open("log", os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(log, stream)
    answer.send(attempt(cell, Path(folder)))
    answer.close()


def attempt(cell: Cell, folder: Path) -> Outcome:
    from scripts.bench.bert.measure import measure, one_gpu

    try:
        one_gpu()
        return Outcome(measure(cell, folder))
    except ConfigError as error:
        return Outcome({}, f"refused: {error}")
    except Exception as error:
        if is_out_of_memory(error):
            return Outcome({}, f"out of memory ({' '.join(str(error).split())[:200]})")
        return Outcome({}, traceback.format_exc(), failed=True)
