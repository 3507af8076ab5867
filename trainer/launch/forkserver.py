"""Forks the ranks of a node from one process that has already imported torch, so that ranks start at once."""

import contextlib
import ctypes
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
from pathlib import Path

from trainer.launch.pool import Process, redirect
from trainer.process.environment import USUAL, Place, threads_of
from trainer.process.exit import die_with_parent, exit_process
from trainer.process.signals import STOP, StartupSignals, undo_inherited
from trainer.process.stdio import tolerate_closed_pipes

# Imports the rank's own code, DDP and torch's optimizers, which would take a second in each rank.
WORKER = "trainer.launch.worker"
LOADED = (WORKER, "torch._dynamo")

# Modules that look for GPUs on import must not initialise one, because a forked process could not do so again.
NO_GPU = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Rank(Process):
    """A process that a `ForkServer` forks.

    Its process id arrives in `pid_pipe`, which closes when the rank's first parent ends.
    """

    def __init__(self, server: "ForkServer", pid_pipe: int) -> None:
        super().__init__(None)  # until the fork; 0 if that failed
        self.server, self.pid_pipe = server, pid_pipe

    def poll(self) -> int | None:
        if self.pid is None:
            self._read_pid(0)
        if not self.pid:
            return None if self.pid is None else -signal.SIGKILL
        return super().poll()

    def kill(self) -> None:
        """Kill the rank, or first the server if it has not forked the rank yet.

        A process that the rank left behind when it ended by itself, such as an upload, keeps running.
        """
        if self.poll() is None:
            if self.pid is None:
                self.server.close()
                self._read_pid(None)
            self.send_signal(signal.SIGKILL)

    def wait(self) -> None:
        os.close(self.pid_pipe)
        super().wait()

    def _read_pid(self, timeout_ms: int | None) -> None:
        closed = select.poll()
        closed.register(self.pid_pipe, 0)
        if closed.poll(timeout_ms):
            self.pid = int(os.read(self.pid_pipe, 20) or 0)
            for _ in range(1000):  # its first parent closes files shortly before it ends
                if not self.pid or is_child(self.pid):
                    break
                time.sleep(0.001)
            self.server.starting.discard(self)
            adopt_orphans(bool(self.server.starting))


# Like `-m`, but with this process's import path, so that a trainer.py in the current folder can't hide `trainer`.
START = (
    "import os, runpy, sys; own, *path = os.environ['ECHELON_PATH'].split('\\n'); sys.path.insert(0, own); "
    "import trainer; sys.path[:] = path; runpy.run_module('trainer.launch.forkserver', None, '__main__', True)"
)


class ForkServer:
    """The process `python -m trainer.launch.forkserver FD MODULE ARGV`, which dies with this one; ranks outlive it.

    `module.run_rank(FD, ARGV)` runs in each rank. `ps` shows `argv`; `place` is the node's first rank.
    """

    def __init__(self, argv: list[str], place: Place, module: str = WORKER) -> None:
        path = "\n".join([str(Path(__file__).parents[2]), *sys.path])
        self.command = [module, *argv]
        self.env = NO_GPU | {"OMP_NUM_THREADS": threads_of(place.local_world), "ECHELON_PATH": path}
        if place.world == place.local_world:
            self.env["GLOO_SOCKET_IFNAME"] = "lo"
        self.starting: set[Rank] = set()
        self._start()

    def _start(self) -> None:
        undo_inherited()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", START, str(theirs.fileno()), *self.command]
        env = USUAL | os.environ | self.env | {"ECHELON_PARENT": str(os.getpid())}
        self.process = subprocess.Popen(command, env=env, start_new_session=True, pass_fds=[theirs.fileno()])
        theirs.close()

    def fork(self, env: dict[str, str], run: int, log: int | None) -> Rank:
        """Fork a rank that runs `run_rank(FD, ARGV)`, where FD is its own descriptor of the file `run`.

        Its output goes to `log`, else to this process's. A dead server is replaced.
        """
        if self.process.poll() is not None:
            self.channel.close()
            self._start()
        adopt_orphans(True)
        pid_pipe, write_end = os.pipe()
        self.starting.add(rank := Rank(self, pid_pipe))
        descriptors = [write_end, run] if log is None else [write_end, run, log]
        with contextlib.suppress(OSError):  # the server is dead
            socket.send_fds(self.channel, [json.dumps(env).encode()], descriptors)
        os.close(write_end)
        return rank

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.channel.close()


def adopt_orphans(on: bool) -> None:
    """Make this process adopt descendants whose own parent ends (Linux)."""
    ctypes.CDLL(None).prctl(36, int(on))  # PR_SET_CHILD_SUBREAPER


def is_child(pid: int) -> bool:
    """Return whether this process can wait for the existing process."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class Server:
    def __init__(self, channel: socket.socket, argv: list[str], module: str = WORKER) -> None:
        self.channel, self.argv, self.module = channel, argv, module
        self.handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOP}  # ranks handle them
        gc.disable()
        for name in {*LOADED, module}:
            importlib.import_module(name)
        gc.freeze()

    def serve(self) -> None:
        while True:
            request, descriptors, _, _ = socket.recv_fds(self.channel, 1 << 16, 3)
            if not request:
                return
            self._fork(json.loads(request), *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)

    def _fork(self, env: dict[str, str], pid_pipe: int, *descriptors: int) -> None:
        """Fork the rank from a short-lived process, so that the supervisor adopts the rank and gets its exit code.

        An error, such as a limit of processes, is reported as the rank's own.
        """
        from trainer.launch.worker import report

        server = os.getpid()
        try:
            if between := os.fork():
                os.waitpid(between, 0)
                return
            between = os.getpid()
            if not (rank := os.fork()):
                os.close(pid_pipe)
                while os.getppid() == between:
                    time.sleep(0.001)
                self._run(env, *descriptors)
            os.write(pid_pipe, str(rank).encode())
        except BaseException as error:
            os.environ |= env
            report(error)
        finally:
            if os.getpid() != server:
                os._exit(1)

    def _run(self, env: dict[str, str], run: int, *log: int) -> None:
        import numpy as np

        from trainer.launch.worker import end_failed

        run_rank = importlib.import_module(self.module).run_rank
        os.setsid()
        self.channel.close()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        gc.enable()
        np.random.seed()  # otherwise all ranks would draw the same numbers
        for descriptor in log:
            redirect(descriptor)
        os.environ |= env
        die_with_parent(int(os.environ["ECHELON_PARENT"]))
        tolerate_closed_pipes()
        signal.signal(signal.SIGUSR2, ignore_stacks)
        StartupSignals().__enter__()  # until the process ends
        try:
            code = run_rank(run, self.argv)
        except BaseException as error:
            end_failed(error)
        exit_process(code)


def ignore_stacks(*_: object) -> None:
    """Ignore SIGUSR2 until faulthandler is registered; a listener would treat it as a stop signal."""


if __name__ == "__main__":
    die_with_parent(int(os.environ["ECHELON_PARENT"]))
    Server(socket.socket(fileno=int(sys.argv[1])), sys.argv[3:], sys.argv[2]).serve()
