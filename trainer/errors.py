"""Defines the exit codes, and the errors that a user can fix, which are printed as one line."""

import difflib
import errno
import os
import re
import resource
import traceback
from collections.abc import Collection, Iterable

from trainer.redact import redact_text

# Exit codes of a run, in addition to 0, 1 (any other exception) and 128 + N (ended by signal N); see docs/errors.md.
UNAVAILABLE = 69  # sysexits' EX_UNAVAILABLE
NUMERICS = 70
DATA = 71
STOPPED = 75  # a signal stopped the run, which has a checkpoint; the same command resumes (sysexits' EX_TEMPFAIL)
GAVE_UP = 76  # the same failure occurred at the same step several times
CONFIG = 78  # sysexits' EX_CONFIG
HUNG = 124  # no rank made progress for too long (the code that `timeout` uses)

NOT_FINITE = "not finite"  # why a run has stopped
NO_MORE = ("can't start new thread", "Resource temporarily unavailable")  # messages of Python and gloo
NO_MEMORY = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: ")  # as torch says
SHARED_MEMORY = "/dev/shm"
NO_SHARED_MEMORY = (
    f"{SHARED_MEMORY}: has no room for the locks or batches of data workers; make room, enlarge it "
    "(docker run --shm-size=1g), or give data.workers=0"
)
FINAL = (NUMERICS, DATA, CONFIG)  # another attempt would meet the same error


class ConfigError(ValueError):
    """A setting that can't work. The message names the key, its value, the reason and the fix. Exit code 78."""


class DataError(ValueError):
    """Data that is missing, damaged or changed. The message names the file and the fix. Exit code 71."""


class UnavailableError(Exception):
    """A server, a disk or other ranks did not respond for too long, and may recover. Exit code 69.

    The message names which.
    """


class NumericsError(ArithmeticError):
    """Numbers with which training can't continue. The message names the step and the fix. Exit code 70."""


class RankError(RuntimeError):
    """The failure of a rank that `launch` started, with its traceback or last output. `code` is its exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(f"launch: {text}")
        self.text, self.code = text, code


FRAME = re.compile(r'^  File "(.*?)", line \d+, in .*(?:\n|\Z)(?:(?:    |  \[Previous line).*(?:\n|\Z))*', re.MULTILINE)
NAMED = re.compile(r'^ +File "(.*?)", line \d+', re.MULTILINE)  # by frames, and by a SyntaxError
OWN, STANDARD = (os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, os.__file__))

EXIT_CODES = {UnavailableError: UNAVAILABLE, NumericsError: NUMERICS, DataError: DATA, ConfigError: CONFIG}


def message(error: BaseException) -> str:
    """Return the text to print, without secrets: one line for a user's mistake, else the traceback."""
    return redact_text(_message(error))


def _message(error: BaseException) -> str:
    place, given = (printable(getattr(error, name, "")) for name in ("place", "given"))  # by `summary.tell_place`
    if isinstance(error, tuple(EXIT_CODES)):
        later = f" ({place})" if place and error.__cause__ else ""  # a first value's place says nothing
        return f"echelon: {printable(str(error))}{later}"
    if isinstance(error, RankError):
        return f"echelon: {printable(error.text, keep=chr(10))}"
    trace = printable("".join(traceback.format_exception(error)), keep="\n").rstrip("\n")
    trace += f"\n  {place}" if place else ""
    if is_out_of_memory(error):
        ways = "a smaller micro_batch (the batch stays), '+callbacks=[activation_checkpoint]' or trainer.precision=bf16"
        advice = printable(getattr(error, "advice", f"try {ways}"))
        return f"{trace}\nechelon: {given}{': ' if given else ''}out of memory; {advice}"
    if lacks_shared_memory(error):
        return f"echelon: {NO_SHARED_MEMORY}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        places = f"a file of the run, of {os.environ.get('TMPDIR', '/tmp')}, or of /dev/shm, which data workers need"
        file = printable(str(error.filename or places))
        way_out = "make room, then trainer.resume=auto continues from the last checkpoint"
        if error.errno == errno.EFBIG:
            way_out = f"the limit is {resource.getrlimit(resource.RLIMIT_FSIZE)[0]} bytes (ulimit -f); raise it"
        return f"echelon: {file}: {error.strerror}; {way_out}"
    if limit := exhausted(error):
        return f"echelon: {limit}"
    return trace


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: Python's, a GPU's, or that of torch's tensors on the CPU.

    A callback may set an attribute `advice` on such an error; `message` appends it.
    """
    torchs = type(error).__name__ == "OutOfMemoryError" or any(words in str(error) for words in NO_MEMORY)
    return isinstance(error, MemoryError) or torchs


def exhausted(error: BaseException) -> str:
    """Return which limit of this process the error hit, and how to raise it; empty for any other error."""
    text, way_out = str(error), "raise this limit, or give fewer data.workers or trainer.devices"
    if (isinstance(error, OSError) and error.errno == errno.EMFILE) or text.startswith("Too many open files"):
        return f"ulimit -n={resource.getrlimit(resource.RLIMIT_NOFILE)[0]}: too few files may be open; {way_out}"
    if text in NO_MORE or (isinstance(error, BlockingIOError) and forks(error)):
        most, limit = resource.getrlimit(resource.RLIMIT_NPROC)[0], "pids.max of the control group"
        if most != resource.RLIM_INFINITY and os.geteuid() != 0:  # which does not count the processes of root
            limit = f"ulimit -u={most}, or {limit}"
        return f"{limit}: too few processes and threads may run; {way_out}"
    return ""


def forks(error: BaseException) -> bool:
    """Return whether starting a process raised the error; a lock may raise the same one."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "fork" in (frames[-1].line or "")


def fold(text: str) -> str:
    """Fold consecutive frames of libraries and of Echelon into one line, for a terminal. A log keeps all frames.

    A text without frames of user code stays whole because the error is ours. ECHELON_TRACEBACK=1 keeps any text whole.
    """
    if os.environ.get("ECHELON_TRACEBACK") == "1" or all(map(package_of, NAMED.findall(text))):
        return text
    hint = " (ECHELON_TRACEBACK=1 shows them)"

    def count(run: re.Match[str]) -> str:
        nonlocal hint
        packages = run[0].split()
        line = f"  ... {len(packages)} frame(s) of {', '.join(dict.fromkeys(packages))}{hint}\n".replace("\0", "")
        hint = ""
        return line

    marked = FRAME.sub(lambda frame: f"\0{name}\n" if (name := package_of(frame[1])) else frame[0], text)
    return re.sub(r"(?:\0.*\n)+", count, marked)


def package_of(file: str) -> str:
    """Return the package of a source file; "" for a file of the user."""
    if file.startswith(OWN):
        return "Echelon"
    if installed := re.search(r"/(?:site|dist)-packages/(\w+)", file):
        return installed[1]
    return "Python" if file.startswith((STANDARD, "<")) else ""


def lacks_shared_memory(error: BaseException) -> bool:
    """Return whether /dev/shm is too full for a data worker, or for a process that starts one."""
    if "allocate shared memory" in str(error):  # torch's, in its own process or in a worker
        return True
    unnamed = isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None
    if not unnamed or not os.path.isdir(SHARED_MEMORY):
        return False
    disk = os.statvfs(SHARED_MEMORY)  # where Python makes semaphores
    return disk.f_bavail * disk.f_frsize < 1 << 20


def exit_code(error: BaseException) -> int:
    if lacks_shared_memory(error):
        return UNAVAILABLE
    if isinstance(error, RankError):
        return error.code
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


def printable(text: str, keep: str = "") -> str:
    """Replace characters that control a terminal or begin a line, except those in `keep`, with question marks."""
    return "".join(c if c.isprintable() or c in keep else "?" for c in text)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint for a name that is not among `names`: similar names, or all of them."""
    known = sorted(names)
    initials = "".join(word[:1] for word in name.split("_"))  # learning_rate: lr
    near = difflib.get_close_matches(name, known, 3, 0.5) or [key for key in known if key == initials]
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known) or 'none'}"


def require_one_of(key: str, value: str, known: Collection[str]) -> None:
    """Refuse an argument that is not among `known`, for calls from Python; `check` does the same for a config.

    Raises:
        ConfigError: The value is unknown.
    """
    if value not in known:
        raise ConfigError(f"{key}={value}: is unknown; {nearest(value, known)}")


REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # s3://bucket/folder, and the same as a Path


def refuse_remote(key: str, path: object) -> None:
    """Refuse a URL where a local path is expected: it would become a local folder `s3:`.

    Raises:
        ConfigError: The path has a scheme, such as `s3://`.
    """
    if REMOTE.match(str(path)):
        raise ConfigError(f"{key}={path}: is a URL, and only local paths work here; mount the store, or copy the files")


def refuse_empty(key: str, path: str | None) -> None:
    """Refuse an empty path, such as an unset shell variable: it would mean the current folder, or the default.

    Raises:
        ConfigError: The path is empty.
    """
    if path == "":
        raise ConfigError(f"{key}=: is empty; give a path, or leave {key} out (is a variable of the shell not set?)")


def require(
    key: str,
    value: float | None,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Refuse a number outside of the range, and NaN. None passes.

    Raises:
        ConfigError: The number is out of range.
    """
    if value is not None and at_least is not None and not value >= at_least:
        raise ConfigError(f"{key}={value}: must be at least {at_least}")
    if value is not None and above is not None and not value > above:
        raise ConfigError(f"{key}={value}: must be more than {above}")
    if value is not None and below is not None and not value < below:
        raise ConfigError(f"{key}={value}: must be less than {below}")
