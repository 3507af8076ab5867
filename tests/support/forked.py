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
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

SERVERS: dict[tuple[str, ...], tuple[subprocess.Popen[bytes], socket.socket]] = {}
LOCK = threading.Lock()


def run_forked(
    module: str, arguments: list[str], cwd: Path, env: dict[str, str], loaded: tuple[str, ...], timeout_s: float
) -> tuple[int, str, str]:
    """Run `module.main()` to its end in a process that has imported `loaded`; its exit code and what it printed.

    Raises:
        subprocess.TimeoutExpired: it did not end in time, and was killed.
    """
    out, err, report = (os.pipe() for _ in range(3))
    request = json.dumps([module, arguments, str(cwd), env]).encode()
    with LOCK:
        channel = started(loaded)[1]
        socket.send_fds(channel, [request], [out[1], err[1], report[1]])
    for _, write in (out, err, report):
        os.close(write)
    texts: dict[int, str] = {}

    def read(number: int, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8", errors="surrogateescape") as file:
            texts[number] = file.read()

    readers = [threading.Thread(target=read, args=(n, pipe[0])) for n, pipe in enumerate((out, err), start=1)]
    for reader in readers:
        reader.start()
    with open(report[0]) as file:
        pid = int(file.readline())
        over = threading.Timer(timeout_s, os.kill, (pid, signal.SIGKILL))
        over.daemon = True
        over.start()
        try:
            code = int(file.readline())
        finally:
            late = over.finished.is_set()
            over.cancel()
    for reader in readers:
        reader.join(timeout_s)
    if late or len(texts) < 2:
        raise subprocess.TimeoutExpired([module, *arguments], timeout_s, texts.get(1), texts.get(2))
    return code, texts[1], texts[2]


def started(loaded: tuple[str, ...]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    if loaded not in SERVERS:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONUNBUFFERED": "1"}
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
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not request:
            sys.exit()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            channel.close()
            out, err, report = descriptors
            if pid := os.fork():
                os.close(out)
                os.close(err)
                os.write(report, f"{pid}\n".encode())
                os.write(report, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
                os._exit(0)
            os.dup2(out, 1)
            os.dup2(err, 2)
            for descriptor in descriptors:
                os.close(descriptor)
            return become(*json.loads(request))
        for descriptor in descriptors:
            os.close(descriptor)


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
    sys.modules["__main__"] = importlib.import_module(module)
    sys.argv = [str(sys.modules["__main__"].__file__), *arguments]
    return module


def reopened(descriptor: int, errors: str) -> io.TextIOWrapper:
    """Return it as the interpreter opens it with PYTHONUNBUFFERED."""
    return io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False), "utf-8", errors, write_through=True)


if __name__ == "__main__":
    sys.path.pop(0)
    with contextlib.suppress(KeyboardInterrupt):
        for name in sys.argv[2:]:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()
        main = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.modules[main].main()
