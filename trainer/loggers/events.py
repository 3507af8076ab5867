"""Writes `events.jsonl`: starts, resumes, checkpoints, validations and skipped steps, and why the run ended."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from trainer.callback import Callback
from trainer.context import Context
from trainer.errors import message
from trainer.files import Appended, finite


class Events(Callback):
    """Writes events.jsonl on rank 0. A resume truncates nothing: the file has the history of all attempts.

    A line has `time` (seconds since 1970), `step` and `event`, then the facts of the event.
    """

    def __init__(self) -> None:
        self.file: Appended | None = None
        self.flushed_at = 0.0  # a validation begins with a flush

    def on_fit_start(self, trainer) -> None:
        resumes = bool(trainer.plan.manifest)
        if trainer.rank or (resumes and trainer.stop_reason):  # a finished run has nothing left to do
            return
        self.file = Appended(trainer.run_dir / "events.jsonl")
        if is_torn(self.file.path):
            self.file.write(b"\n")
        attempt = int(os.environ.get("ECHELON_ATTEMPT") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        event = "restart" if attempt else "resume" if resumes else "start"
        facts = {"attempt": attempt} if attempt else {}
        self._write(trainer, event, {**facts, "ranks": trainer.world, "device": trainer.device.type})

    def on_flush(self, trainer) -> None:
        self.flushed_at = time.monotonic()

    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        self._write(trainer, "validation", {"seconds": round(time.monotonic() - self.flushed_at, 4), **metrics})

    def on_event(self, trainer, event: str, facts: dict[str, Any]) -> None:
        self._write(trainer, event, facts)

    def on_fit_end(self, trainer) -> None:
        if error := sys.exc_info()[1]:  # the one that ends the run
            lines = [line for line in message(error).splitlines() if not line.startswith(" ")]  # no stack frames
            self._write(trainer, "crash", {"error": lines[-1][:500]})
        else:
            self._write(trainer, "stop", {"reason": trainer.stop_reason, "seconds": round(trainer.seconds, 3)})

    def _write(self, trainer: Context, event: str, facts: dict[str, Any]) -> None:
        if self.file is None:
            return
        line = {"time": round(time.time(), 3), "step": trainer.step, "event": event, **facts}
        self.file.write(f"{json.dumps(finite(line), default=str)}\n".encode())
        self.file.close()  # the last checkpoint of a crashed run may be written after `on_fit_end`


def is_torn(file: Path) -> bool:
    """Return whether the file ends with the partial line of a killed process."""
    try:
        with file.open("rb") as lines:
            return lines.seek(0, os.SEEK_END) > 0 and lines.seek(-1, os.SEEK_END) >= 0 and lines.read(1) != b"\n"
    except OSError:
        return False
