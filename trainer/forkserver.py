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

from trainer.launch import die_with_parent
from trainer.signals import STOP

# Both take a second and more: what a rank runs, and what DDP and torch's optimizers would load in each.
LOADED = ("trainer.main", "trainer.session", "torch._dynamo")
# So that nothing that asks for GPUs as it is loaded opens one: a process that is forked then could not.
NO_GPU = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Rank:
    """A process that a `ForkServer` forks, used as one of `subprocess.Popen`."""

    def __init__(self, server: "ForkServer") -> None:
        self.server = server
        self.handle: int | None = None  # a descriptor of the process, from when it has been forked
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.server.hear()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Not where it is not there yet: it has nothing to stop."""
        with contextlib.suppress(ProcessLookupError):
            if self.handle is not None:
                signal.pidfd_send_signal(self.handle, number)

    def kill(self) -> None:
        self.server.hear()
        if self.handle is None:
            self.server.kill()
        self.send_signal(signal.SIGKILL)

    def wait(self) -> None:
        """Until it has ended, by which its parent has to hear of it within 5 s."""
        if self.handle is not None:
            ended(self.handle, None)
            deadline = time.monotonic() + 5
            while self.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
        if self.returncode is None:
            self.server.kill()
        if self.handle is not None:
            os.close(self.handle)


class ForkServer:
    """The process `python -m trainer.forkserver FD TYPED`, which ends with this one, and its ranks with it.

    `dead`: it has ended; so have its ranks then, each as by SIGKILL.
    """

    def __init__(self, typed: list[str], env: dict[str, str]) -> None:
        """`env`: variables of all ranks, for they may be read as libraries load."""
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "trainer.forkserver", str(theirs.fileno()), *typed]
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
                data, handles, _, _ = self.channel.recvmsg(1 << 12, socket.CMSG_SPACE(4), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data, handles = b"", []
            if not data:
                return self.kill()
            number, code = json.loads(data)
            if code is None:
                self.ranks[number].handle = int.from_bytes(handles[0][2][:4], sys.byteorder)
            else:
                self.ranks[number].returncode = code

    def kill(self) -> None:
        self.dead = True
        self.process.kill()
        self.process.wait()
        for rank in self.ranks:
            rank.returncode = -signal.SIGKILL if rank.returncode is None else rank.returncode

    def close(self) -> None:
        self.kill()
        self.channel.close()


def ended(handle: int, within_ms: int | None) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(within_ms))


def serve(channel: socket.socket, typed: list[str]) -> None:
    """Forks a rank for each request, and tells of it, with its descriptor, and of its end, with its exit code."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOP}  # whoever stops all means the ranks
    gc.disable()
    for name in LOADED:
        importlib.import_module(name)
    gc.freeze()
    ranks, forked, server = dict[int, tuple[int, int]](), 0, os.getpid()  # by descriptor: its number and process
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in ranks:
                number, pid = ranks.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                channel.send(json.dumps([number, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]).encode())
                continue
            request, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 2)
            if not request:
                return
            if not (pid := os.fork()):
                try:
                    for other in (channel.detach(), *ranks):
                        os.close(other)
                    for number, handler in handlers.items():
                        signal.signal(number, handler)
                    run(json.loads(request), descriptors, typed, server)
                finally:
                    os._exit(1)
            handle = os.pidfd_open(pid)
            ranks[handle], forked = (forked, pid), forked + 1
            poll.register(handle, select.POLLIN)
            socket.send_fds(channel, [json.dumps([ranks[handle][0], None]).encode()], [handle])
            for given in descriptors:
                os.close(given)


def run(env: dict[str, str], descriptors: list[int], typed: list[str], server: int) -> None:
    """In the new process, which does not return from here."""
    import numpy as np

    os.setsid()
    gc.enable()
    np.random.seed()  # else all ranks would draw what this process would have drawn
    resolved, *log = descriptors
    for target in (1, 2) if log else ():
        os.dup2(log[0], target)
    os.environ |= env | {"ECHELON_PARENT": str(server)}
    sys.argv[1:] = ["--resolved", str(resolved), *typed]
    sys.modules["trainer.main"].main()


if __name__ == "__main__":
    die_with_parent(int(os.environ["ECHELON_PARENT"]))
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
