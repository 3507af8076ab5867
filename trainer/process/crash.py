"""Writes the error of a run into its folder, because the terminal may be gone."""

import json
import time
import traceback
from pathlib import Path
from typing import Any

from trainer.errors import EXIT_CODES, NOT_FINITE, NumericsError, is_out_of_memory, message, printable
from trainer.files import Appended, write_json
from trainer.log import log
from trainer.redact import redact_text


def note_crash(run_dir: Path, error: BaseException, rank: int, world: int, done: dict[str, int], follows: bool) -> None:
    """Write the error to summary.json, and with all frames to rank 0's log; other ranks print to their own.

    `done` has the finished `steps` and `samples`. If a peer may have failed first (`follows`), its error is kept.
    """
    text = message(error)
    if rank == 0:
        frames = "" if "\n" in text else f"\n{printable(''.join(traceback.format_exception(error)), keep=chr(10))}"
        note_in_log(run_dir / "logs" / "rank0.log", f"{text}{redact_text(frames)}".rstrip())
    of_rank = f"rank {rank}: " if world > 1 else ""
    stopped = NOT_FINITE if isinstance(error, NumericsError) else "error"
    line = of_rank + redact_text(headline(error, text))
    summarize_crash(run_dir / "summary.json", line, done, follows, stopped)


def note_in_log(file: Path, text: str) -> None:
    log_file = Appended(file)
    log_file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} ERROR {text}\n".encode())
    log_file.close()


def headline(error: BaseException, text: str) -> str:
    """Return one line: a user's mistake's message, else the error's type and the start of its message."""
    if isinstance(error, tuple(EXIT_CODES)) or is_out_of_memory(error) or text.startswith("echelon: "):
        return text.splitlines()[-1]
    lines = str(error).splitlines() or [""]
    if lines[0].startswith("Caught "):  # of a DataLoader's worker, whose traceback is the message
        return printable(lines[-1])
    first = lines[0]
    return printable(f"{type(error).__name__}: {first}" if first else type(error).__name__)


def has_crashed(summary: dict[str, Any]) -> bool:
    return summary.get("stopped") in ("error", NOT_FINITE)


def summarize_crash(file: Path, line: str, done: dict[str, int], follows: bool = False, stopped: str = "error") -> None:
    """Write why the run stopped to summary.json. The numbers of a run that had finished training are kept."""
    found = read_summary(file)
    crashed = has_crashed(found)
    if follows and crashed and abs(found.get("steps", 0) - done["steps"]) <= 1:  # ranks are at most a step apart
        return
    numbers = found if found.get("steps") == done["steps"] else {}
    try:
        write_json(file, {**numbers, **done, "stopped": stopped, "error": line})
    except OSError as failure:
        log.warning("%s: can't be written: %s", file, failure.strerror)


def read_summary(file: Path) -> dict[str, Any]:
    """Return the content of summary.json; an empty dict if it is missing or damaged."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
