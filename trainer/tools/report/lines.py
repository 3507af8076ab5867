"""Reads the JSON lines of a run's files in a stream. The files may be missing, torn or damaged."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LONGEST = 1 << 26  # bytes of a line; 4,096 ranks of step_times.jsonl have about 1 MB


class Lines:
    """An iterator over a file's objects with an integer `step`.

    After the iteration, `note` has one line on what could not be read, or "".
    """

    def __init__(self, path: Path) -> None:
        self.path, self.note, self.count = path, "", 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        name, damaged, torn = self.path.name, 0, False
        try:
            with self.path.open("rb") as file:
                while line := file.readline(LONGEST):
                    if (found := parse(line)) is not None:
                        self.count += 1
                        yield found
                    elif not line.isspace():
                        damaged, torn = damaged + 1, not line.endswith(b"\n")
        except FileNotFoundError:
            self.note = f"{name}: is missing"
            return
        except OSError as error:
            self.note = f"{name}: can't be read ({error.strerror})"
            return
        if damaged:
            what = "its last line is torn" if torn and damaged == 1 else f"{damaged} line(s) are damaged"
            self.note = f"{name}: {what}, and left out"
        elif not self.count:
            self.note = f"{name}: has no line yet"


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None if it is no object with an integer `step`."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and whole(found.get("step")) is not None else None


def read_object(path: Path) -> tuple[dict[str, Any], str]:
    """Return the object in a JSON file, and a note on what is missing."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}, f"{path.name}: is missing"
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path.name}: can't be read ({getattr(error, 'strerror', None) or 'no JSON'})"
    return (found, "") if isinstance(found, dict) else ({}, f"{path.name}: can't be read (no object)")


def number(value: Any) -> float:
    """Return a JSON number as a float; NaN for anything else, such as the null of a diverged run."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return float("nan")
    try:
        return float(value)
    except OverflowError:
        return float("nan")


def whole(value: Any) -> int | None:
    """Return a count or a step; None for anything else."""
    return value if type(value) is int and 0 <= value < 1 << 53 else None
