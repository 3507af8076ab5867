"""Defines a finding: one line about this machine."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

ERROR, WARNING, NOTE, OK = LEVELS = ("error", "warning", "note", "ok")


@dataclass(frozen=True)
class Finding:
    """A finding about one subject.

    The levels: `error`, training can't start; `warning`, it may fail later, or be slow; `note`, something is unknown or
    worth knowing; `ok`, a fact. `data` is the value as JSON, in bytes, seconds or bytes/s.
    """

    subject: str
    value: str
    level: str = OK
    consequence: str = ""
    way_out: str = ""
    data: Any = None

    def line(self) -> str:
        return "; ".join(filter(None, (f"{self.subject}: {self.value}", self.consequence, self.way_out)))


def find(
    problem: object, subject: str, value: str, level: str, consequence: str, way_out: str = "", data: Any = None
) -> Finding:
    """Return a finding of this level if there is a problem, else the fact alone."""
    return Finding(subject, value, level, consequence, way_out, data) if problem else Finding(subject, value, data=data)


def in_time(limit_s: float, late: Finding, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings produced in a thread; after `limit_s` seconds, those produced so far and `late`.

    A dead disk or a lost GPU never answers.
    """
    made = list[Finding]()

    def make() -> None:
        try:
            made.extend(findings)  # one by one
        except Exception as error:  # of a driver or a library; the other findings are worth as much
            made.append(Finding(late.subject, f"can't be examined: {error!r}", WARNING))

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(limit_s)
    answered = not thread.is_alive()
    yield from list(made)
    if not answered:
        yield late


def size(number: float) -> str:
    """Return bytes in words: 512.0 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"


def share_by_speed() -> str:
    """Return the fix if ranks differ in speed."""
    from trainer.callback import Symptom
    from trainer.composition import in_words, remedies

    return f"see {in_words(*remedies(Symptom.SLOW_RANK)[0])}"
