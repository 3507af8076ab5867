"""The errors that are the user's to mend: `main` prints them as one line, without a traceback."""

import difflib
import errno
import traceback
from collections.abc import Collection, Iterable


class ConfigError(ValueError):
    """A setting that can't work: the message names the key, its value, the reason and the way out. Exit code 78."""


class DataError(ValueError):
    """Data that is missing, damaged or not what it was: the message names the file and the way out. Exit code 71."""


class UnavailableError(Exception):
    """Data that may be had another time: a server or a disk that gave nothing for too long. The message names it. Exit
    code 69 (sysexits' EX_UNAVAILABLE)."""


class NumericsError(ArithmeticError):
    """Numbers that training can't go on from: the message names the step and the way out. Exit code 70."""


EXIT_CODES = {UnavailableError: 69, NumericsError: 70, DataError: 71, ConfigError: 78}


FINAL = (70, 71, 78)  # another try would meet the same


def told(error: BaseException) -> str:
    """What the user reads of it: one line where it is theirs to mend, else the traceback."""
    if isinstance(error, tuple(EXIT_CODES)):
        return f"echelon: {error}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's
        advice = (
            "a smaller micro_batch (the batch stays), '+callbacks=[activation_checkpoint]' or trainer.precision=bf16"
        )
        return f"{''.join(traceback.format_exception(error))}echelon: out of memory; try {advice}\n"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or "a file of the run"
        return (
            f"echelon: {where}: {error.strerror}; make room, then trainer.resume=auto goes on from the last checkpoint"
        )
    return "".join(traceback.format_exception(error))


def exit_code(error: BaseException) -> int:
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


def printable(text: str) -> str:
    """On one line, and without what a terminal obeys: of a stranger's."""
    return "".join(c if c.isprintable() else "?" for c in text)


def nearest(name: str, names: Iterable[str]) -> str:
    """The way out of a name that is not among `names`."""
    known = sorted(names)
    near = difflib.get_close_matches(name, known, 3, 0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known) or 'none'}"


def require_one_of(key: str, value: str, known: Collection[str]) -> None:
    """Raises:
    ConfigError: for a word that is none of these. Of a config `check` has said so already; from Python it is said here.
    """
    if value not in known:
        raise ConfigError(f"{key}={value}: is unknown; {nearest(value, known)}")


def require(
    key: str,
    value: float | None,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Raises:
    ConfigError: for a number outside of the range, and for NaN. None passes.
    """
    if value is not None and at_least is not None and not value >= at_least:
        raise ConfigError(f"{key}={value}: must be at least {at_least}")
    if value is not None and above is not None and not value > above:
        raise ConfigError(f"{key}={value}: must be more than {above}")
    if value is not None and below is not None and not value < below:
        raise ConfigError(f"{key}={value}: must be less than {below}")


STOPPED = 75  # exit code: stopped by a signal with a checkpoint; start again to go on (sysexits' EX_TEMPFAIL)
