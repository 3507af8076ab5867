"""Runs a function of a notebook or a script on several ranks: `launch`."""

import codecs
import os
import pickle
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from trainer.annotated import PositiveInt, checked
from trainer.comm.device import count_gpus
from trainer.errors import EXIT_CODES, ConfigError
from trainer.launch.failure import find_failure
from trainer.launch.forkserver import ForkServer, Rank
from trainer.launch.worker import end_failed
from trainer.process.environment import Place, detect, refuse_without_loopback, threads_of, variables
from trainer.process.signals import STOP
from trainer.process.temporary import sockets_in, temporary_folder
from trainer.timeouts import INTERRUPT_S, PEERS_S

T = TypeVar("T")

RESULT = "result"  # the file in the private folder that has what rank 0 returned
TAIL = 2000  # characters of a rank's log that go into an error


def launch(function: Callable[..., T], *args: Any, devices: int | Literal["auto"] = "auto") -> T:
    """Run `function(*args)` on `devices` ranks of this node, and return the result of rank 0.

    Each rank is a process of its own, which a fresh process forks after it has loaded torch. A fork of this process
    would inherit locks of a notebook's threads, and a CUDA context that it can't use. The function travels by value,
    thanks to cloudpickle, so it may be defined in a notebook's cell. A Trainer inside finds its place by itself.

    This process prints what rank 0 prints. An interrupt asks the ranks to stop, which lets a Trainer write a
    checkpoint. After 60 s, or a second interrupt, the ranks are killed. If a rank fails, the others are killed.

    Args:
        devices: The number of ranks; auto: one for each GPU, or one.

    Raises:
        ConfigError: The function or its arguments can't be sent, or a rank has raised this error.
        DataError, NumericsError, UnavailableError: A rank has raised this error.
        RuntimeError: A rank has failed in another way. The message has its traceback.
        KeyboardInterrupt: This process was interrupted. All ranks have ended.
    """
    if launcher := detect(dict(os.environ)).launcher:
        raise ConfigError(f"launch: {launcher} has started this process as a rank; call the function itself")
    devices = checked("launch: devices", devices, PositiveInt | Literal["auto"])
    world = count_gpus("auto") or 1 if devices == "auto" else int(devices)
    refuse_without_loopback()
    packed = pack(function, args)
    with temporary_folder() as private, os.fdopen(os.memfd_create("launch"), "wb", buffering=0) as memory:
        memory.write(packed)
        name = getattr(function, "__name__", type(function).__name__)
        with Team(world, name, private, memory.fileno()) as team:
            team.wait()
        try:
            return pickle.loads((private / RESULT).read_bytes())
        except FileNotFoundError:
            raise RuntimeError("launch: rank 0 ended without a result") from None


def pack(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return the pickled function and arguments.

    Raises:
        ConfigError: They can't be pickled, or only by cloudpickle, which is missing.
    """
    try:
        from cloudpickle import dumps
    except ImportError:
        dumps = None
    try:
        packed = (dumps or pickle.dumps)((function, args))
    except Exception as error:  # of any `__reduce__`
        if dumps:
            reason = f"can't be sent to other processes ({error}); make such objects inside the function"
            raise ConfigError(f"launch: the function or an argument {reason}") from None
        packed = b"__main__"
    if not dumps and b"__main__" in packed:
        raise ConfigError(
            "launch: a function of a notebook or a script is sent by cloudpickle, which is not installed; "
            "pip install 'cloudpickle>=3,<4', or import the function from a module"
        )
    return packed


class Team:
    """The ranks of one `launch`, which end with its context.

    Args:
        name: Of the function, for `ps`.
        private: A folder for the store, the logs, the reports of errors, and the result.
        run: Descriptor of the packed function.
    """

    def __init__(self, world: int, name: str, private: Path, run: int) -> None:
        self.world, self.name, self.private, self.run = world, name, private, run
        self.ranks: dict[int, Rank] = {}
        self.output, self.decoder = -1, codecs.getincrementaldecoder("utf-8")("replace")

    def __enter__(self) -> "Team":
        usual = {"OMP_WAIT_POLICY": "passive", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | dict(os.environ)
        env = usual | {"OMP_NUM_THREADS": threads_of(self.world), "GLOO_SOCKET_IFNAME": "lo"}
        self.server = ForkServer([self.name], env, __name__)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        self.output, write_end = os.pipe()
        for rank in range(self.world):
            place = Place(rank, self.world, rank, self.world, str(self.private / "store"))
            with self._log(rank).open("ab") as log:
                log_or_pipe = log.fileno() if rank else write_end
                self.ranks[rank] = self.server.fork(variables(place, self.private), self.run, log_or_pipe)
        os.close(write_end)

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks.values():
            rank.kill()
        for rank in self.ranks.values():
            rank.wait()
        self.server.close()
        self._forward(0.0)
        os.close(self.output)

    def wait(self) -> None:
        """Wait until all ranks have ended.

        Raises:
            KeyboardInterrupt, RuntimeError, and the errors of `EXIT_CODES`: As in `launch`.
        """
        try:
            codes = self._wait(float("inf"))
        except KeyboardInterrupt:
            if all(rank.pid for rank in self.ranks.values()):
                for rank in self.ranks.values():
                    rank.send_signal(STOP[0])
                self._wait(time.monotonic() + INTERRUPT_S)
            raise
        if (failure := find_failure(codes, self.ranks, self.private, None, [])) is None:
            return
        text = failure.text.removeprefix("echelon: ").rstrip()
        kind = next((kind for kind, code in EXIT_CODES.items() if code == failure.code), None)
        if kind:
            raise kind(text)
        tail = "" if failure.reported else self._log(failure.rank).read_text(errors="replace")[-TAIL:]
        raise RuntimeError(f"launch: {text}\n{tail}".rstrip())

    def _wait(self, deadline: float) -> dict[int, int]:
        """Return the exit codes of the ranks that have ended. Once a rank has failed, the others have 5 s."""
        codes: dict[int, int] = {}
        while len(codes) < self.world and time.monotonic() < deadline:
            self._forward(0.05)
            codes = {rank: code for rank, process in self.ranks.items() if (code := process.poll()) is not None}
            if any(codes.values()):
                deadline = min(deadline, time.monotonic() + PEERS_S)
        return codes

    def _forward(self, timeout_s: float) -> None:
        """Print what rank 0 has written: a notebook shows only what its own process prints."""
        while select.select([self.output], [], [], timeout_s)[0]:
            if not (text := os.read(self.output, 1 << 16)):
                time.sleep(timeout_s)  # rank 0 has closed its output
                break
            sys.stdout.write(self.decoder.decode(text))
            sys.stdout.flush()
            timeout_s = 0.0

    def _log(self, rank: int) -> Path:
        return self.private / f"rank{rank}.log"


def run_rank(descriptor: int, argv: list[str]) -> int:
    """Run the function in a rank that `Team` started. Rank 0 leaves the result in the private folder."""
    try:
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue] a TextIOWrapper
        private = Path(os.environ["ECHELON_ERROR_FILE"]).parent
        packed = os.pread(descriptor, os.fstat(descriptor).st_size, 0)  # the ranks share the position
        os.close(descriptor)
        function, args = pickle.loads(packed)
        with sockets_in(private):
            result = function(*args)
        if os.environ["RANK"] == "0":
            (private / RESULT).write_bytes(pack_result(result))
        return 0
    except BaseException as error:
        end_failed(error)


def pack_result(result: Any) -> bytes:
    try:
        try:
            from cloudpickle import dumps
        except ImportError:
            from pickle import dumps
        return dumps(result)
    except Exception as error:
        kind = type(result).__name__
        raise ConfigError(
            f"launch: the function returned a {kind}, which can't be sent back ({error}); return numbers or tensors"
        ) from None
