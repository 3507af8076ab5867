"""Runs a function of a notebook or a script on several ranks: `launch`."""

import codecs
import os
import pickle
import select
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal, TypeVar

from trainer.annotated import PositiveInt, checked
from trainer.comm.device import count_gpus
from trainer.errors import EXIT_CODES, ConfigError, RankError
from trainer.launch.failure import find_failure
from trainer.launch.forkserver import ForkServer
from trainer.launch.pool import Pool, Process
from trainer.process.environment import Place, detect, refuse_without_loopback, variables
from trainer.process.notebook import RANK, in_notebook
from trainer.process.signals import STOP
from trainer.process.temporary import sockets_in, temporary_folder
from trainer.timeouts import INTERRUPT_S

T = TypeVar("T")

RESULT = "result"  # the file in the private folder that has what rank 0 returned
TAIL = 2000  # characters of a rank's log that go into an error


def launch(function: Callable[..., T], *args: Any, devices: int | Literal["auto"] = "auto") -> T:
    """Run `function(*args)` on `devices` ranks of this node, and return the result of rank 0.

    Each rank is a process of its own, forked from a fresh process that has imported torch. A fork of this process would
    inherit the locks of a notebook's threads, and a CUDA context that it can't use. The function is sent by value, with
    cloudpickle, so it may be defined in a notebook cell. A Trainer inside the function detects its rank by itself.

    This process prints what rank 0 prints, which in a notebook includes the progress of a Trainer. An interrupt asks
    the ranks to stop, so that a Trainer can write a checkpoint. After 60 s, or on a second interrupt, they are killed.
    If a rank fails, the others are killed.

    Args:
        devices: The number of ranks; auto: one per GPU, or one.

    Raises:
        ConfigError: The function or its arguments can't be sent, or a rank raised this error.
        DataError, NumericsError, UnavailableError: A rank raised this error.
        RankError: A rank failed in another way. The message has its traceback.
        KeyboardInterrupt: This process was interrupted. All ranks have ended.
    """
    if launcher := detect(dict(os.environ)).launcher:
        raise ConfigError(f"launch: {launcher} has started this process as a rank; call the function itself")
    devices = checked("launch: devices", devices, PositiveInt | Literal["auto"])
    world = count_gpus("auto") or 1 if devices == "auto" else int(devices)
    refuse_without_loopback()
    shown = {RANK: "1"} if in_notebook() else {}
    name, place = getattr(function, "__name__", type(function).__name__), Place(0, world, 0, world, starts=True)
    with ExitStack() as stack:
        private = stack.enter_context(temporary_folder())
        memory = stack.enter_context(os.fdopen(os.memfd_create("launch"), "wb", buffering=0))
        memory.write(pack(function, args))
        output = stack.enter_context(Output())
        server = stack.enter_context(closing(ForkServer([name], place, __name__)))

        def start(own: Place) -> Process:
            with (private / f"rank{own.rank}.log").open("ab") as log:
                end = log.fileno() if own.rank else output.write_end
                return server.fork(variables(own, private) | shown, memory.fileno(), end)

        with Pool(place, private, start, output.forward) as pool:
            return collect(pool, private)


def pack(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return the pickled function and arguments; raise ConfigError if that needs cloudpickle, or is impossible."""
    dumps = find_dumps()
    try:
        packed = dumps((function, args))
    except Exception as error:  # any `__reduce__` may raise any error
        if dumps is not pickle.dumps:
            reason = f"can't be sent to other processes ({error}); make such objects inside the function"
            raise ConfigError(f"launch: the function or an argument {reason}") from None
        packed = b"__main__"
    if dumps is pickle.dumps and b"__main__" in packed:
        raise ConfigError(
            "launch: a function of a notebook or a script is sent by cloudpickle, which is not installed; "
            "pip install 'cloudpickle>=3,<4', or import the function from a module"
        )
    return packed


def find_dumps() -> Callable[[Any], bytes]:
    try:
        from cloudpickle import dumps
    except ImportError:
        return pickle.dumps
    return dumps


class Output:
    """Rank 0's output, which this process prints because a notebook shows only what its own process prints."""

    def __enter__(self) -> "Output":
        self.read_end, self.write_end = os.pipe()
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return self

    def __exit__(self, *_: object) -> None:
        self.forward(0.0)
        os.close(self.read_end)
        os.close(self.write_end)

    def forward(self, timeout_s: float) -> None:
        while select.select([self.read_end], [], [], timeout_s)[0]:
            sys.stdout.write(self.decoder.decode(os.read(self.read_end, 1 << 16)))
            sys.stdout.flush()
            timeout_s = 0.0


def collect(pool: Pool, private: Path) -> Any:
    """Return rank 0's result, or raise the error of the first rank to fail. On an interrupt, let ranks save."""
    try:
        codes = pool.wait()
    except KeyboardInterrupt:
        if all(rank.pid for rank in pool.ranks.values()):
            pool.send(STOP[0])
            pool.wait(INTERRUPT_S)
        raise
    if failure := find_failure(codes, pool.ranks, private, None, []):
        text = failure.text.removeprefix("echelon: ").rstrip()
        if kind := next((kind for kind, code in EXIT_CODES.items() if code == failure.code), None):
            raise kind(text)
        tail = "" if failure.reported else (private / f"rank{failure.rank}.log").read_text(errors="replace")[-TAIL:]
        raise RankError(f"{text}\n{tail}".rstrip(), failure.code)
    try:
        return pickle.loads((private / RESULT).read_bytes())
    except FileNotFoundError:
        raise RuntimeError("launch: rank 0 ended without a result") from None


def run_rank(descriptor: int, argv: list[str]) -> int:
    """Run the function in a rank that `launch` started. Rank 0 leaves the result in the private folder."""
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


def pack_result(result: Any) -> bytes:
    try:
        return find_dumps()(result)
    except Exception as error:
        kind = type(result).__name__
        raise ConfigError(
            f"launch: the function returned a {kind}, which can't be sent back ({error}); return numbers or tensors"
        ) from None
