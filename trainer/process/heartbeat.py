"""Shows to who started this rank how far it has come, and that it still moves. Standard library only."""

import faulthandler
import os
import struct
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from trainer.trainer import Trainer


FORMAT = struct.Struct("<qqqd")


class Beat(NamedTuple):
    began: int  # the step at which the rank began
    step: int  # the one that it has done
    busy: int  # whether it completes a checkpoint before it ends; each piece that is written is a beat then
    until: float = 0.0  # its time and the patience it asks for, by the clock of the node that nobody sets


class Heartbeat:
    """A file of the last `Beat`, for a supervisor. Without a path nobody looks."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600) if path else None
        self.began = self.step = -1
        self.log: IO[str] | None = None
        self._tell(0.0, False)

    @classmethod
    def of(cls, trainer: "Trainer") -> "Heartbeat":
        """For who has started this rank, or else watched by itself, if it has peers."""
        heartbeat = cls(os.environ.get("ECHELON_HEARTBEAT", ""))
        if trainer.world > 1:
            heartbeat.watch(2 * trainer.options.timeout_s, trainer.run_dir / "logs" / f"rank{trainer.rank}.log")
        return heartbeat

    def watch(self, still_s: float, log: Path | None = None) -> None:
        """Where there is no supervisor: after `still_s` seconds without a beat write the stacks of all threads to
        `log`, else to standard error, and end the process with code 1, by a thread of C's, which needs no lock of the
        interpreter's."""
        if self.file is None:
            self.still_s, self.rearm_at = still_s, 0.0
            self.log = log.open("a") if log else os.fdopen(os.dup(2), "a")  # by its path a socket can't be opened

    def close(self) -> None:
        """Nobody watches any longer."""
        if self.log:
            faulthandler.cancel_dump_traceback_later()
            self.log.close()
        if self.file is not None:
            os.close(self.file)
        self.log = self.file = None

    def _rearm(self, patience_s: float) -> None:
        now = time.monotonic()
        if now > self.rearm_at or patience_s:  # not in every step: it starts a thread
            assert self.log
            faulthandler.dump_traceback_later(self.still_s + patience_s, exit=True, file=self.log)
            self.rearm_at = now if patience_s else now + self.still_s / 10

    def beat(self, step: int | None = None, patience_s: float = 0.0, busy: bool = False) -> None:
        """`step`: the one that is done, where another is. `patience_s`: what comes now may take so much longer."""
        if step is None and self.began < 0:
            return
        if step is not None:
            self.began, self.step = step if self.began < 0 else self.began, step
        if self.log:
            self._rearm(patience_s)
        self._tell(patience_s, busy)

    def _tell(self, patience_s: float, busy: bool) -> None:
        if self.file is not None:
            os.pwrite(self.file, FORMAT.pack(self.began, self.step, busy, time.monotonic() + patience_s), 0)


def read(path: Path) -> Beat | None:
    """None before the rank's first step."""
    beat = last(path)
    return beat if beat and beat.began >= 0 else None


def last(path: Path) -> Beat | None:
    """None before the rank has made its plan."""
    try:
        return Beat(*FORMAT.unpack(path.read_bytes()))
    except (OSError, struct.error):
        return None
