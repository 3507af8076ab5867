"""Heartbeats: how far a rank has come, and whether it still moves. Standard library only."""

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

FORMAT = struct.Struct("<qqqd")
TICK_S = 1.0  # at most


class Beat(NamedTuple):
    began: int  # the step at which the rank began
    step: int  # the last step that the rank has done
    busy: int  # whether the rank completes a checkpoint before it ends: each piece that it writes is a beat
    until: float = 0.0  # the beat's time and the patience that it asks for, by the node's monotonic clock


class Heartbeat:
    """A file with the last `Beat`, for the supervisor that reads it; without a path no file is written.

    A path of an environment that a launcher has left behind may lead nowhere, and counts as none then.
    """

    def __init__(self, path: str = "") -> None:
        self.file: int | None = None
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600) if path else None
        self.began = self.step = -1
        self.ended = threading.Event()
        self.left_s = float("inf")  # until the rank counts as still
        self.still_s = 0.0
        self._write(0.0, False)

    def watch(self, still_s: float, on_still: Callable[[], Any], log: IO[str] | None = None) -> None:
        """Call `on_still` after half of `still_s` seconds without a beat, counted from the next beat on.

        With `log`, after all of them, write the stacks of all threads to it and end the process with code 1.
        A thread counts its own ticks, so time in which the process is suspended does not count.
        """
        self.still_s = still_s
        self.left_s = float("inf") if self.began < 0 else still_s
        threading.Thread(target=self._tick, args=(on_still, log), name="heartbeat", daemon=True).start()

    def _tick(self, on_still: Callable[[], Any], log: IO[str] | None) -> None:
        tick_s, told = min(TICK_S, self.still_s / 20), False
        while not self.ended.wait(tick_s):
            self.left_s -= tick_s
            if self.left_s > self.still_s / 2:
                told = False
            elif not told:
                told = True
                on_still()
            if log and self.left_s <= 0:
                log.write(f"Timeout ({timedelta(seconds=self.still_s)})!\n")
                log.flush()
                faulthandler.dump_traceback(log)
                os._exit(1)
        if log:
            log.close()

    def close(self) -> None:
        """End the watch, and close the file."""
        self.ended.set()
        if self.file is not None:
            os.close(self.file)
        self.file = None

    def beat(self, step: int | None = None, patience_s: float = 0.0, busy: bool = False) -> None:
        """Note that the rank moves.

        Args:
            step: The step that is done now.
            patience_s: Extra seconds allowed for the work that begins now.
            busy: The rank completes a checkpoint before it ends.
        """
        if step is None and self.began < 0:
            return
        if step is not None:
            self.began, self.step = step if self.began < 0 else self.began, step
        self.left_s = self.still_s + patience_s
        self._write(patience_s, busy)

    def _write(self, patience_s: float, busy: bool) -> None:
        if self.file is not None:
            os.pwrite(self.file, FORMAT.pack(self.began, self.step, busy, time.monotonic() + patience_s), 0)


def read(path: Path) -> Beat | None:
    """Return the last beat; None before the rank's first step."""
    beat = last(path)
    return beat if beat and beat.began >= 0 else None


def last(path: Path) -> Beat | None:
    """Return the last beat, which may be from before the first step; None before the rank has planned."""
    try:
        return Beat(*FORMAT.unpack(path.read_bytes()))
    except (OSError, struct.error):
        return None
