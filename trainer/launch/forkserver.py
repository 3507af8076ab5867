"""Forks the ranks of a node from one process that has loaded torch, so that a rank starts at once."""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from trainer.process.exit import die_with_parent, exit_process, run_guarded
from trainer.process.signals import STOP, StartupSignals
from trainer.process.stdio import tolerate_closed_pipes
from trainer.timeouts import REAP_S

# The rank's own code, and modules that DDP and torch's optimizers would load in each rank, for a second of a core each.
LOADED = ("trainer.launch.worker", "torch._dynamo")

# Modules that ask for GPUs as they are loaded open none: a process that is forked later could not open it again.
NO_GPU = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Rank:
    """A process that a `ForkServer` forks, with the methods of `subprocess.Popen`."""

    def __init__(self, server: "ForkServer") -> None:
        self.server = server
        self.pid: int | None = None  # from when it has been forked
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.server.hear()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, but not to a rank that is not forked yet: it has nothing to stop."""
        with contextlib.suppress(ProcessLookupError):
            if self.pid is not None and self.poll() is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.server.hear()
        if self.pid is None:
            self.server.kill()
        self.send_signal(signal.SIGKILL)

    def wait(self) -> None:
        """Wait until the rank has ended. A server that does not tell of the end in time is killed."""
        lived = time.monotonic()
        while self.poll() is None or (self.server.dead and self.lives()):
            time.sleep(0.01)
            if self.lives():
                lived = time.monotonic()
            elif time.monotonic() - lived > REAP_S:
                self.server.kill()

    def lives(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
        return False


# `-m`, but with this process's import path, and with its own `trainer` before a trainer.py of the current folder.
START = (
    "import os, runpy, sys; own, *path = os.environ['ECHELON_PATH'].split('\\n'); sys.path.insert(0, own); "
    "import trainer; sys.path[:] = path; runpy.run_module('trainer.launch.forkserver', None, '__main__', True)"
)


class ForkServer:
    """The process `python -m trainer.launch.forkserver FD ARGV`, which ends with this one, and its ranks with it.

    Args:
        argv: The arguments of the run, which `ps` shows.
        env: Variables of all ranks, because libraries may read them as they load.

    Attributes:
        dead: The process has ended, and its ranks with it, each as by SIGKILL.
    """

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", START, str(theirs.fileno()), *argv]
        path = "\n".join([str(Path(__file__).parents[2]), *sys.path])
        env = os.environ | NO_GPU | env | {"ECHELON_PARENT": str(os.getpid()), "ECHELON_PATH": path}
        self.process = subprocess.Popen(command, env=env, start_new_session=True, pass_fds=[theirs.fileno()])
        theirs.close()
        self.ranks: list[Rank] = []
        self.dead = False

    def fork(self, env: dict[str, str], run: int, log: int | None) -> Rank:
        """Fork a rank that runs `run_rank(FD, ARGV)`, where FD is its own descriptor of the file `run`.

        Its output goes to `log`; if that is None, to the output of this process.
        """
        rank = Rank(self)
        self.ranks.append(rank)
        request = json.dumps(env).encode()
        with contextlib.suppress(OSError):  # it is dead
            socket.send_fds(self.channel, [request], [run] if log is None else [run, log])
        return rank

    def hear(self) -> None:
        """Take in what the server has told meanwhile."""
        while not self.dead:
            try:
                news = self.channel.recv(1 << 12, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                news = b""
            if news:
                number, pid, code = json.loads(news)
                rank = self.ranks[number]
                rank.pid = pid
                if code is not None:  # the other thread that hears may have taken it already
                    rank.returncode = code
            else:
                self.kill()

    def kill(self) -> None:
        self.dead = True
        self.process.kill()
        self.process.wait()
        for rank in self.ranks:
            rank.returncode = -signal.SIGKILL if rank.returncode is None else rank.returncode

    def close(self) -> None:
        self.kill()
        self.channel.close()


class Server:
    """The server in its own process: forks a rank for each request, and tells its number, process and exit code."""

    def __init__(self, channel: socket.socket, argv: list[str]) -> None:
        self.channel, self.argv = channel, argv
        self.handlers: dict[int, Any] = {n: signal.signal(n, signal.SIG_IGN) for n in STOP}  # ranks act on them
        gc.disable()
        for name in LOADED:
            importlib.import_module(name)
        gc.freeze()
        self.read, self.write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.write)
        self.handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        self.numbers: dict[int, int] = {}
        self.forked = 0

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        poll.register(self.read, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self.read in ready:
                os.read(self.read, 1 << 12)
                self._reap()
            if self.channel.fileno() in ready:
                request, descriptors, _, _ = socket.recv_fds(self.channel, 1 << 16, 2)
                if not request:
                    return
                self._fork(json.loads(request), descriptors)

    def _fork(self, env: dict[str, str], descriptors: list[int]) -> None:
        server = os.getpid()
        if not (pid := os.fork()):
            try:
                self._run(env | {"ECHELON_PARENT": str(server)}, *descriptors)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        self.numbers[pid], self.forked = self.forked, self.forked + 1
        self._tell(pid, None)
        for descriptor in descriptors:
            os.close(descriptor)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if child.si_code != os.CLD_EXITED:  # it could not end its own children
                    with contextlib.suppress(OSError):
                        os.killpg(child.si_pid, signal.SIGKILL)
                _, status = os.waitpid(child.si_pid, 0)
                self._tell(child.si_pid, os.waitstatus_to_exitcode(status))

    def _tell(self, pid: int, code: int | None) -> None:
        self.channel.send(json.dumps([self.numbers[pid], pid, code]).encode())

    def _run(self, env: dict[str, str], run: int, *log: int) -> None:
        """Run the rank, and end its process."""
        import numpy as np

        from trainer.launch.worker import run_rank

        os.setsid()
        for descriptor in (self.channel.detach(), self.read, self.write):
            os.close(descriptor)
        signal.set_wakeup_fd(-1)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        gc.enable()
        np.random.seed()  # else all ranks would draw what this process would have drawn
        for descriptor in log:
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)
        os.environ |= env
        die_with_parent(int(env["ECHELON_PARENT"]))
        tolerate_closed_pipes()
        signal.signal(signal.SIGUSR2, ignore_stacks)
        StartupSignals().__enter__()  # to the end of the process
        exit_process(run_guarded(lambda: run_rank(run, self.argv)))


def ignore_stacks(*_: object) -> None:
    """Stand for faulthandler, which a rank registers later, so that no listener takes SIGUSR2 for a signal to stop."""


if __name__ == "__main__":
    die_with_parent(int(os.environ["ECHELON_PARENT"]))
    Server(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]).serve()
