"""Starts a tool once for each device of this machine, as the launcher starts ranks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainer.errors import fold
from trainer.launch.failure import find_failure
from trainer.process.environment import Place, refuse_without_loopback, threads_of, variables
from trainer.process.temporary import temporary_folder
from trainer.timeouts import PEERS_S

ROOT = Path(__file__).parents[3]


def start(module: str, arguments: list[str], devices: int) -> int:
    """Run `python -m MODULE ARGUMENTS` as `devices` ranks of this node, and return the exit code.

    A rank ends with this process. If one fails, the others have 5 s to end, and the first failure is printed.
    """
    refuse_without_loopback()
    with temporary_folder() as private:
        ranks = [
            subprocess.Popen([sys.executable, "-m", module, *arguments], env=environment(rank, devices, private))
            for rank in range(devices)
        ]
        try:
            return wait(ranks, private)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def environment(rank: int, devices: int, private: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {
        **os.environ,
        **variables(Place(rank, devices, rank, devices, str(private / "store")), private),
        "ECHELON_PARENT": str(os.getpid()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": threads_of(devices),
        "PYTHONPATH": path,
    }


def wait(ranks: "list[subprocess.Popen[bytes]]", private: Path) -> int:
    """Wait until all ranks have ended, or one has failed; print the first failure, and return its code."""
    deadline, codes = float("inf"), dict[int, int]()
    while len(codes) < len(ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
        codes = {number: code for number, rank in enumerate(ranks) if (code := rank.poll()) is not None}
        if any(codes.values()):
            deadline = min(deadline, time.monotonic() + PEERS_S)
    if (failure := find_failure(codes, range(len(ranks)), private, None, [])) is None:
        return max(codes.values())
    print(fold(failure.text).rstrip(), file=sys.stderr)
    return failure.code
