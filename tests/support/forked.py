"""A module's `main` in a process that is forked from one that has loaded what it needs: it starts at once.

    python tests/support/forked.py CHANNEL MODULE ...

is that process. Each request on the socket CHANNEL has a module, its arguments, a folder and an environment, and the
descriptors of standard output, standard error and of a pipe for the process's number and exit code.
"""

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SERVERS: dict[tuple[str, ...], tuple[subprocess.Popen[bytes], socket.socket]] = {}
RUNNING: set["Process"] = set()
LOCK = threading.Lock()


class Process:
    """Runs `module.main()` in a process that has imported `loaded`; with the methods of `subprocess.Popen`."""

    def __init__(
        self, module: str, arguments: list[str], cwd: Path, env: dict[str, str], loaded: tuple[str, ...]
    ) -> None:
        self.args, self.returncode = [module, *arguments], None
        out, err, report = (os.pipe() for _ in range(3))
        request = json.dumps([module, arguments, str(cwd), env]).encode()
        with LOCK:
            channel = started(loaded)[1]
            socket.send_fds(channel, [request], [out[1], err[1], report[1]])
        for _, write in (out, err, report):
            os.close(write)
        self.stdout, self.stderr = (
            os.fdopen(fd, encoding="utf-8", errors="surrogateescape") for fd in (out[0], err[0])
        )
        self.report, self.texts = report[0], dict[Any, str]()
        self.pid = self._number()
        self.readers: list[threading.Thread] = []
        RUNNING.add(self)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        for file in (self.stdout, self.stderr):
            file.close()

    def _number(self) -> int:
        """The next number of the report: the process's own, then its exit code."""
        return struct.unpack("i", os.read(self.report, 4))[0]

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self.report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._number()
            os.close(self.report)
            RUNNING.discard(self)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read what it prints, until all that print have ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self.readers:
            self.readers = [
                threading.Thread(target=lambda file=file: self.texts.update({file: file.read()}), daemon=True)
                for file in (self.stdout, self.stderr)
            ]
            for reader in self.readers:
                reader.start()
        for reader in self.readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        texts = self.texts.get(self.stdout), self.texts.get(self.stderr)
        if None in texts:
            raise subprocess.TimeoutExpired(self.args, timeout or 0, *texts)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return texts


def started(loaded: tuple[str, ...]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    if loaded not in SERVERS:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        command = [sys.executable, __file__, str(theirs.fileno()), *loaded]
        SERVERS[loaded] = subprocess.Popen(command, env=env, cwd="/", pass_fds=[theirs.fileno()]), ours
        theirs.close()
    return SERVERS[loaded]


@atexit.register
def stop() -> None:
    for process, channel in SERVERS.values():
        channel.close()
        process.kill()
        process.wait()
    SERVERS.clear()


def serve(channel: socket.socket) -> str:
    """Return in each process that a request asks for; the module whose `main` it is to run."""
    running: dict[int, tuple[int, int]] = {}  # by the descriptor of a process: its number, and the pipe of its report
    while True:
        ready = select.select([channel, *running], [], [])[0]
        for ended in running.keys() & set(ready):
            pid, report = running.pop(ended)
            os.write(report, struct.pack("i", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
            os.close(report)
            os.close(ended)
        if channel not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not request:
            sys.exit()
        out, err, report = descriptors
        if pid := os.fork():
            os.close(out)
            os.close(err)
            os.write(report, struct.pack("i", pid))
            running[os.pidfd_open(pid)] = pid, report
            continue
        channel.close()
        os.dup2(out, 1)
        os.dup2(err, 2)
        for descriptor in {*descriptors, *running, *(other for _, other in running.values())}:
            os.close(descriptor)
        return become(*json.loads(request))


def become(module: str, arguments: list[str], cwd: str, env: dict[str, str]) -> str:
    """Make this process what `python -m MODULE ARGUMENTS` would be."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    importlib.invalidate_caches()
    tempfile.tempdir = None
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    sys.stdout = sys.__stdout__ = reopened(1, "strict")
    sys.stderr = sys.__stderr__ = reopened(2, "backslashreplace")
    forkserver = sys.modules.get("trainer.launch.forkserver")
    if forkserver and (module != "trainer.main" or re.search("devices|resume", " ".join(arguments))):  # it starts ranks
        forkserver.subprocess = Spare(forkserver)
    sys.modules["__main__"] = importlib.import_module(module)
    sys.argv = [str(sys.modules["__main__"].__file__), *arguments]
    return module


def compose_once() -> None:
    """Load what Hydra loads late and fill the caches of its grammars. Of what it keeps of a config, nothing stays.

    A warning that Python shows once per place is shown here, and not in the run.
    """
    from hydra.core.singleton import Singleton

    from trainer.config.compose import compose
    from trainer.config.folders import CONF

    kept, argv = dict(Singleton._instances), list(sys.argv)
    compose(["trainer.allow_targets=[a]", "~callbacks.progress", "+b={c: 1}"], [CONF])
    Singleton._instances, sys.argv[:] = kept, argv
    del os.environ["HYDRA_FULL_ERROR"]


class Spare:
    """Stands for the module `subprocess` in `trainer.launch.forkserver`, whose interpreter would load torch once more.

    Its only process is forked before the run begins, and so has no state of the run. Once it has ended, the next one is
    an interpreter, as without tests.
    """

    def __init__(self, forkserver: Any) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        if pid := os.fork():
            theirs.close()
            self.process = Forked(pid)
            return
        self.channel.close()
        request, descriptors, _, _ = socket.recv_fds(theirs, 1 << 20, 1)
        if not request:  # the run has started no ranks
            os._exit(0)
        theirs.close()
        arguments, env = json.loads(request)
        os.setsid()
        os.environ.clear()
        os.environ.update(env)
        sys.path[:] = env["ECHELON_PATH"].split("\n")[1:]
        sys.argv = [forkserver.__file__, *arguments]
        forkserver.die_with_parent(int(env["ECHELON_PARENT"]))
        forkserver.Server(socket.socket(fileno=descriptors[0]), arguments[2:], arguments[1]).serve()
        sys.exit()

    def Popen(self, command: list[str], env: dict[str, str], pass_fds: Sequence[int], **options: Any) -> Any:
        try:
            socket.send_fds(self.channel, [json.dumps([command[3:], env]).encode()], pass_fds)
        except OSError:
            return subprocess.Popen(command, env=env, pass_fds=pass_fds, **options)
        self.channel.close()
        return self.process


class Forked:
    """A child of this process, with methods of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid, self.code = pid, None

    def poll(self) -> int | None:
        return self.code if self.code is not None else self.wait(os.WNOHANG)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, options: int = 0) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, options)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code


def reopened(descriptor: int, errors: str) -> io.TextIOWrapper:
    """Return it as the interpreter opens it with PYTHONUNBUFFERED."""
    return io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False), "utf-8", errors, write_through=True)


if __name__ == "__main__":
    sys.path.pop(0)
    with contextlib.suppress(KeyboardInterrupt):
        for name in sys.argv[2:]:
            importlib.import_module(name)
        if "trainer.main" in sys.argv:
            compose_once()
        if "torch" in sys.modules and "trainer.session" not in sys.argv:
            sys.exit("torch was imported")  # a run that must not import it would find it loaded
        gc.collect()
        gc.freeze()
        main = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.exit(sys.modules[main].main())
