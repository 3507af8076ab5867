"""Writes and reads heartbeats: a rank's progress, and the time of its last sign of life. Standard library only."""

import contextlib
import faulthandler
import os
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple

from trainer import timeouts
from trainer.errors import HUNG

FORMAT = struct.Struct("<qqqd")


class Beat(NamedTuple):
    began: int  # the step at which the rank started
    step: int  # the last step that the rank has finished
    busy: int  # whether the rank is writing its last checkpoint, with a beat for each piece
    until: float = 0.0  # the beat's time plus its extra seconds, by the node's monotonic clock


class Heartbeat:
    """A file with the last `Beat`, which the supervisor reads. No file is written without an existing path."""

    def __init__(self, path: str = "") -> None:
        self.file: int | None = None
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600) if path else None
        self.watched = self.file is not None
        self.began = self.step = -1
        self.ended = threading.Event()
        self.left_s = float("inf")  # until the rank counts as still
        self.still_s = 0.0
        self.beat()

    def watch(self, still_s: float, on_still: Callable[[], Any], log: IO[str] | None = None) -> None:
        """Call `on_still` after half of `still_s` seconds without a beat, counted from the next beat on.

        With `log`, after `still_s` seconds write the stacks of all threads to it, and end the process with code 124.
        Time is counted in a thread's ticks, so that a suspended process is not considered still.
        """
        self.still_s, self.watched = still_s, True
        self.left_s = float("inf") if self.began < 0 else still_s
        threading.Thread(target=self._tick, args=(on_still, log), name="heartbeat", daemon=True).start()

    def _tick(self, on_still: Callable[[], Any], log: IO[str] | None) -> None:
        tick_s, called = min(timeouts.TICK_S, self.still_s / 20), False
        while not self.ended.wait(tick_s):
            self.left_s -= tick_s
            if self.left_s > self.still_s / 2:
                called = False
            elif not called:
                called = True
                on_still()
            if log and self.left_s <= 0:
                log.write(f"Timeout ({timedelta(seconds=self.still_s)})!\n")
                log.flush()
                faulthandler.dump_traceback(log)
                os._exit(HUNG)
        if log:
            log.close()

    def close(self) -> None:
        self.ended.set()
        if self.file is not None:
            os.close(self.file)
        self.file = None

    def beat(self, step: int | None = None, patience_s: float = 0.0, busy: bool = False) -> None:
        """Record that `step` has finished, and allow `patience_s` extra seconds for the work that begins now."""
        if step is not None:
            self.began, self.step = step if self.began < 0 else self.began, step
        if self.began >= 0:
            self.left_s = self.still_s + patience_s
        if self.file is not None:
            os.pwrite(self.file, FORMAT.pack(self.began, self.step, busy, time.monotonic() + patience_s), 0)


def read(path: Path) -> Beat | None:
    """Return the last beat; None before the rank's first step."""
    beat = last(path)
    return beat if beat and beat.began >= 0 else None


def last(path: Path) -> Beat | None:
    """Return the last beat, which may precede the first step; None before the rank has planned."""
    try:
        return Beat(*FORMAT.unpack(path.read_bytes()))
    except (OSError, struct.error):
        return None
