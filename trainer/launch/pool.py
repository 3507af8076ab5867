"""Starts, watches and ends the ranks of a node: for runs, `launch`, tools and tests. Imports no torch."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from trainer.process.environment import Place
from trainer.process.exit import die_with_parent, run_guarded
from trainer.process.signals import ASKED, held
from trainer.timeouts import PEERS_S


class Process:
    """A child of this process in its own session, with methods like those of `subprocess.Popen`.

    It stays a zombie until `wait`, so that no other process gets its process id.
    """

    def __init__(self, pid: int | None) -> None:
        self.pid = pid  # 0 after `wait`; None: not known yet

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs. Call it from one thread only.

        If a signal killed the process, kill the rest of its process group, which it can no longer do.
        """
        assert self.pid
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is None or end.si_code == os.CLD_EXITED:
            return end and end.si_status
        self._kill_group()
        return -end.si_status

    def send_signal(self, number: int) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and the rest of its group, even if the process itself has ended."""
        self._kill_group()
        self.send_signal(signal.SIGKILL)  # right after the fork it has no group of its own yet

    def wait(self) -> None:
        if self.pid:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            self.poll()
            pid, self.pid = self.pid, 0
            os.waitpid(pid, 0)

    def _kill_group(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def fork(place: Place, call: Callable[[Place], int], log: Path | None = None) -> Process:
    """Fork a rank that runs `call(place)`, ends with its result or with this process, and writes to `log`."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    if pid := os.fork():
        return Process(pid)
    code = 1
    try:
        os.setsid()
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)  # the inherited one is the parent's
        for number in ASKED:
            signal.signal(number, signal.SIG_DFL)
        if log is not None:
            redirect(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
            sys.stdout = sys.stderr = os.fdopen(1, "w", 1)  # the parent's may belong to pytest or a notebook
        if place.store:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        code = run_guarded(lambda: call(place))
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as ended:
        print(f"echelon: rank {place.rank} called sys.exit({ended.code!r})", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def redirect(log: int) -> None:
    """Redirect all output of this process to a file, and close the file's descriptor."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


class Pool:
    """The ranks that this process starts; leaving the context kills them.

    `place` is the first rank, or with `place.starts` stands for all of its node. `private` has the file in which ranks
    meet if all are on this node. `pause` waits for the given seconds between two polls.
    """

    def __init__(
        self,
        place: Place,
        private: Path,
        start: Callable[[Place], Process],
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self.start, self.pause = start, pause
        count = place.local_world if place.starts else 1
        store = str(private / "store") if count == place.world else ""
        first = replace(place, store=store, launcher=place.launcher or "echelon", starts=False)
        self.places = [replace(first, rank=place.rank + n, local_rank=place.local_rank + n) for n in range(count)]
        self.ranks: dict[int, Process] = {}

    def __enter__(self) -> "Pool":
        try:
            for place in self.places:
                with held():  # otherwise an interrupt could lose a rank that has just been started
                    self.ranks[place.rank] = self.start(place)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks.values():  # before any is waited for: one that waits for a disk can't be killed
            rank.kill()
        for rank in self.ranks.values():
            rank.wait()

    def send(self, number: int) -> None:
        for rank in list(self.ranks.values()):
            rank.send_signal(number)

    def watch(self) -> Iterator[Mapping[int, int]]:
        """Yield, after each pause, the exit codes by rank of the ranks that have ended, until all have."""
        codes: dict[int, int] = {}
        while len(codes) < len(self.ranks):
            self.pause(0.05)
            codes = {rank: code for rank, process in self.ranks.items() if (code := process.poll()) is not None}
            yield codes

    def wait(self, limit_s: float = float("inf"), peers_s: float = PEERS_S) -> Mapping[int, int]:
        """Return the exit codes of the ranks that end in time: `peers_s` after the first failure at the latest."""
        codes: Mapping[int, int] = {}
        deadline = time.monotonic() + limit_s
        for codes in self.watch():
            if any(codes.values()):
                deadline = min(deadline, time.monotonic() + peers_s)
            if time.monotonic() >= deadline:
                break
        return codes
