"""Forks the ranks of a node from one process that has loaded torch: a rank starts at once. Nothing else runs in it."""

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

from trainer.process.exit import die_with_parent
from trainer.process.signals import STOP

# What a rank runs, and what DDP and torch's optimizers would load in each: a second of a core and more for either.
LOADED = ("trainer.session", "torch._dynamo")


# So that nothing that asks for GPUs as it is loaded opens one: a process that is forked then could not.
NO_GPU = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Rank:
    """A process that a `ForkServer` forks, used as one of `subprocess.Popen`."""

    def __init__(self, server: "ForkServer") -> None:
        self.server = server
        self.pid: int | None = None  # from when it has been forked
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.server.hear()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Not where it is not there yet: it has nothing to stop."""
        with contextlib.suppress(ProcessLookupError):
            if self.pid is not None and self.poll() is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.server.hear()
        if self.pid is None:
            self.server.kill()
        self.send_signal(signal.SIGKILL)

    def wait(self) -> None:
        """Until it has ended, of which its server has to tell within 5 s."""
        lived = time.monotonic()
        while self.poll() is None or (self.server.dead and self.lives()):
            time.sleep(0.01)
            if self.lives():
                lived = time.monotonic()
            elif time.monotonic() - lived > 5:
                self.server.kill()

    def lives(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
        return False


class ForkServer:
    """The process `python -m trainer.forkserver FD TYPED`, which ends with this one, and its ranks with it.

    `dead`: it has ended; so have its ranks then, each as by SIGKILL.
    """

    def __init__(self, typed: list[str], env: dict[str, str]) -> None:
        """`env`: variables of all ranks, for they may be read as libraries load."""
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "trainer.launch.forkserver", str(theirs.fileno()), *typed]
        env = os.environ | NO_GPU | env | {"ECHELON_PARENT": str(os.getpid())}
        self.process = subprocess.Popen(command, env=env, start_new_session=True, pass_fds=[theirs.fileno()])
        theirs.close()
        self.ranks: list[Rank] = []
        self.dead = False

    def fork(self, env: dict[str, str], resolved: int, log: int | None) -> Rank:
        """A rank that runs `python -m trainer.main --resolved FD TYPED`, FD being its own of `resolved`. What it prints
        goes to `log`; None: to where this process prints."""
        rank = Rank(self)
        self.ranks.append(rank)
        request = json.dumps(env).encode()
        with contextlib.suppress(OSError):  # it is dead
            socket.send_fds(self.channel, [request], [resolved] if log is None else [resolved, log])
        return rank

    def hear(self) -> None:
        """Takes what it has told meanwhile."""
        while not self.dead:
            try:
                told = self.channel.recv(1 << 12, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                told = b""
            if told:
                number, pid, code = json.loads(told)
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
    """In the process itself: forks a rank for each request, and tells of it, and of its end: its number, process and
    exit code."""

    def __init__(self, channel: socket.socket, typed: list[str]) -> None:
        self.channel, self.typed = channel, typed
        self.handlers: dict[int, Any] = {n: signal.signal(n, signal.SIG_IGN) for n in STOP}  # they are for the ranks
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
                if child.si_code != os.CLD_EXITED:  # it could not end what it had started
                    with contextlib.suppress(OSError):
                        os.killpg(child.si_pid, signal.SIGKILL)
                _, status = os.waitpid(child.si_pid, 0)
                self._tell(child.si_pid, os.waitstatus_to_exitcode(status))

    def _tell(self, pid: int, code: int | None) -> None:
        self.channel.send(json.dumps([self.numbers[pid], pid, code]).encode())

    def _run(self, env: dict[str, str], resolved: int, *log: int) -> None:
        """The rank, which does not return from here."""
        import numpy as np

        from trainer.main import main

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
        sys.argv[1:] = ["--resolved", str(resolved), *self.typed]
        main()


if __name__ == "__main__":
    die_with_parent(int(os.environ["ECHELON_PARENT"]))
    Server(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]).serve()
