"""Defines a finding: one line about this machine."""

from dataclasses import dataclass
from typing import Any

ERROR, WARNING, NOTE, OK = LEVELS = ("error", "warning", "note", "ok")


@dataclass(frozen=True)
class Finding:
    """A finding about one subject. `error`: training can't start. `warning`: it may fail later, or be slow.

    `note`: something is not to be seen, or worth knowing. `ok`: a fact.

    Attributes:
        data: The value for programs, in bytes, seconds or bytes/s; JSON.
    """

    subject: str
    value: str
    level: str = OK
    consequence: str = ""
    way_out: str = ""
    data: Any = None

    def line(self) -> str:
        """Return what, value, consequence and way out."""
        return "; ".join(filter(None, (f"{self.subject}: {self.value}", self.consequence, self.way_out)))


def size(number: float) -> str:
    """Return bytes in words: 512.0 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"
