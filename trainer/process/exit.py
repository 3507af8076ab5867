"""How a process ends: after the one that tells, without the interpreter's own end, or with its parent."""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from typing import NoReturn


def let_first_tell() -> None:
    """Call it before an error is printed that other ranks may have too. The first rank of a node tells at once, and as
    it ends, torchrun and mpirun (and srun with -K) end the others: what they say after 5 s is theirs alone."""
    if any(os.environ.get(name, "0") != "0" for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")):
        time.sleep(5)


def leave(code: int) -> NoReturn:
    """Ends this process as `sys.exit` does, but without the interpreter's own end: it would end a thread of gloo's that
    lets go of a tensor just then, which aborts the process ("terminate called without an active exception")."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] as multiprocessing ends its own
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_parent(parent: int | None = None) -> None:
    """SIGKILL this process when its parent ends, however that ends (Linux); exit if `parent` has ended already."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if parent not in (None, os.getppid()):
        os._exit(1)
