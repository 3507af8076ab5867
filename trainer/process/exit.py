"""Ends processes: after the first rank has printed the error, without interpreter shutdown, or with the parent."""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from trainer.errors import exit_code, fold, message
from trainer.timeouts import FIRST_RANK_S


def wait_for_first_rank() -> None:
    """Delay all ranks of a node but the first before they print an error that all may have.

    The first prints and exits at once, whereupon torchrun, mpirun and `srun -K` end the others.
    """
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    if any(os.environ.get(name, "0") != "0" for name in names):
        time.sleep(FIRST_RANK_S)


def run_guarded(call: Callable[[], int]) -> int:
    """Return the exit code of `call`. Print one line for a user's mistake, a folded traceback for other errors."""
    try:
        return call()
    except Exception as error:
        wait_for_first_rank()
        print(fold(message(error)), file=sys.stderr, flush=True)
        return exit_code(error)
    except KeyboardInterrupt:
        return 130


def end_at_once(error: BaseException) -> NoReturn:
    print(fold(message(error)), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code(error))


@contextlib.contextmanager
def refuse_exit() -> Iterator[None]:
    """Turn `sys.exit` in user code into an error, because exit(0) would pass for a finished run."""
    try:
        yield
    except SystemExit as stop:
        raise RuntimeError(f"sys.exit({stop.code!r}) was called in a run; raise an exception instead") from stop


def exit_process(code: int) -> NoReturn:
    """End this process like `sys.exit`, but without interpreter shutdown.

    The shutdown may end a gloo thread that is releasing a tensor, which aborts the process ("terminate called without
    an active exception").
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises for the data workers that are killed here
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] as multiprocessing ends its own
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends (Linux); exit if `parent` has ended already."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if parent not in (None, os.getppid()):
        os._exit(1)
