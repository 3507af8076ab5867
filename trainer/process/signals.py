"""What reaches a run from outside: requests to stop, and a terminal or pipe that is no longer there. No torch here."""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer.errors import STOPPED
from trainer.log import log
from trainer.process.environment import is_first
from trainer.process.exit import die_with_parent
from trainer.process.stdio import show_cursor

if TYPE_CHECKING:
    from typing_extensions import Self


STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # the last by SLURM, before a job's time ends


EARLY = "stopped before the first step"


def heeded() -> list[signal.Signals]:
    """Those of `STOP` that a run acts on: under nohup SIGHUP is ignored, and stays so."""
    return [n for n in STOP if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


class Heard:
    """While entered, a thread calls `hear` with each signal to stop; those of an outer one rest.

    A Python handler only runs between two bytecodes of the main thread, so not during a collective; the interpreter's
    wakeup descriptor is written at once. Outside the main thread it does nothing.
    """

    asked: Callable[[], Any] = staticmethod(lambda: None)  # called in the thread at SIGUSR2: no rank moves

    def __init__(self, hear: Callable[[int], None]) -> None:
        self.hear = hear

    def __enter__(self) -> "Self":
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            Start.over = not isinstance(self, Start)
            self._read, self._write = socket.socketpair()
            self._write.setblocking(False)
            self._fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
            self._handlers = {number: signal.signal(number, lambda *_: None) for number in heeded()}
            threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._main:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._fd)
            self._write.close()

    def _watch(self) -> None:
        while number := self._read.recv(1):
            if number[0] in STOP:
                self.hear(number[0])
            elif number[0] == signal.SIGUSR2:
                self.asked()
        self._read.close()


class Start(Heard):
    """Entered as the process begins. Until another is, there is nothing that a checkpoint would have to keep, and a
    signal ends the process at once, with exit code 75 (130 for SIGINT); afterwards, as it would without."""

    over = False

    def __init__(self) -> None:
        super().__init__(self._leave)

    def _leave(self, number: int) -> None:
        if Start.over or number == signal.SIGINT:
            os._exit(128 + number)
        if is_first() and number != signal.SIGTERM:  # by which a launcher ends the others where one has failed
            with contextlib.suppress(OSError):
                os.write(2, f"echelon: {signal.Signals(number).name}: {EARLY}\n".encode())
        os._exit(STOPPED)


class Signals(Heard):
    """While entered, the first signal to stop sets `name`; a SIGINT after that ends the process.

    A second SIGTERM does not: who ends a whole job sends one to the ranks, and their launcher passes on its own.
    """

    name = ""
    heard = ""  # the last of any in this process

    def __init__(self) -> None:
        super().__init__(self._stop)

    def _stop(self, number: int) -> None:
        if self.name and number == signal.SIGINT:
            with contextlib.suppress(OSError):
                print("echelon: second signal, stopping now, without a checkpoint", file=sys.stderr, flush=True)
            show_cursor()
            os._exit(128 + signal.SIGINT)
        if not self.name:
            self.name = Signals.heard = signal.Signals(number).name
            again = "; again stops now" if number == signal.SIGINT else ""
            with contextlib.suppress(OSError):
                log.info("%s: stopping after this step with a checkpoint%s", self.name, again)


def start_worker() -> None:
    """Of a rank: it ends when the rank has saved, not by a signal to all processes of a job."""
    signal.set_wakeup_fd(-1)  # inherited: it is how the rank hears of its own signals
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    die_with_parent(parent.pid if parent else None)
