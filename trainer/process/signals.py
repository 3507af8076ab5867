"""Handles signals that ask a run to stop. Imports no torch."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.errors import STOPPED
from trainer.log import log
from trainer.process.environment import is_first_rank, is_launched
from trainer.process.exit import die_with_parent
from trainer.process.stdio import show_cursor

if TYPE_CHECKING:
    from typing_extensions import Self


# Users, terminals and batch systems send these to stop a job.
ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

# Batch systems and the kernel send these before a kill. A program may use them for something else.
WARNINGS = (signal.SIGUSR2, signal.SIGXCPU, signal.SIGPWR, signal.SIGIO)
STOP = ASKED + WARNINGS
EARLY = "stopped before the first step"


def undo_inherited() -> None:
    """Unblock signals that the parent has blocked, and stop ignoring SIGCHLD, which would lose exit codes."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP, signal.SIGCHLD})
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def ignore(*_: object) -> None:
    """Do nothing, because the listener reads the signal from the wakeup descriptor."""


def handled_signals() -> list[signal.Signals]:
    """Return the signals of `STOP` to handle: not SIGHUP under nohup, nor warnings that have a handler."""
    asked = [n for n in ASKED if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    return asked + [n for n in WARNINGS if signal.getsignal(n) in (signal.SIG_DFL, ignore)]


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delay signals whose handlers may raise, for example during a fork, where Python drops the exception.

    Blocking them is not enough, because another thread would receive them.
    """
    came: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    before = {number: handler for number in ASKED if main and callable(handler := signal.getsignal(number))}
    before = {number: handler for number, handler in before.items() if handler is not ignore}
    try:
        for number in before:
            signal.signal(number, lambda which, _: came.append(which))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


class SignalListener:
    """A context in which a thread calls `hear` with each stop signal. Outer listeners are idle meanwhile.

    A Python handler would run only between two bytecodes of the main thread, so not during a collective. The wakeup
    descriptor is written at once. Outside the main thread a listener does nothing.
    """

    on_inspect: Callable[[], Any] = staticmethod(lambda: None)  # called on SIGUSR2 if that is not a stop signal
    last_words = ""  # a sweep's, for a signal that ends this process at once

    def __init__(self, hear: Callable[[int], None]) -> None:
        self.hear = hear

    def __enter__(self) -> "Self":
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            StartupSignals.over = not isinstance(self, StartupSignals)
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._handlers = {number: signal.signal(number, ignore) for number in handled_signals()}
            threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._main:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._fd)
            os.close(self._write)

    def _watch(self) -> None:
        while number := os.read(self._read, 1):
            if number[0] in self._handlers:
                self.hear(number[0])
            elif number[0] == signal.SIGUSR2:
                self.on_inspect()
        os.close(self._read)

    def _end(self, code: int) -> NoReturn:
        if SignalListener.last_words:
            with contextlib.suppress(OSError):
                os.write(2, SignalListener.last_words.encode())
        os._exit(code)


class StartupSignals(SignalListener):
    """The listener before there is a checkpoint to write: a signal ends the process at once.

    The exit code is 75, or 130 for SIGINT. Once a run has had its own listener, it is 128 + the signal's number.
    """

    over = False

    def __init__(self) -> None:
        super().__init__(self._exit)

    def _exit(self, number: int) -> None:
        if StartupSignals.over or number == signal.SIGINT:
            self._end(128 + number)
        if is_first_rank() and (number != signal.SIGTERM or not is_launched()):  # which ends peers of a failed rank
            with contextlib.suppress(OSError):
                os.write(2, f"echelon: {signal.Signals(number).name}: {EARLY}\n".encode())
        self._end(STOPPED)


class StopSignals(SignalListener):
    """The listener of a run: the first signal sets `name`, and a SIGINT after that ends the process.

    A second SIGTERM is ignored, because stopping a job signals both the ranks and their launcher, which forwards it.
    """

    name = ""
    received = ""  # the last stop signal that any run in this process has received

    def __init__(self) -> None:
        super().__init__(self._stop)

    def _stop(self, number: int) -> None:
        if self.name and number == signal.SIGINT:
            with contextlib.suppress(OSError):
                print("echelon: second signal, stopping now, without a checkpoint", file=sys.stderr, flush=True)
            show_cursor()
            self._end(128 + signal.SIGINT)
        if not self.name:
            self.name = StopSignals.received = signal.Signals(number).name
            again = "; a second SIGINT stops now" if number == signal.SIGINT else ""
            with contextlib.suppress(OSError):
                log.info("%s: stopping after this step with a checkpoint%s", self.name, again)


def ignore_stop_signals() -> None:
    """Keep a data worker alive until its rank has saved, because a batch system may signal all processes of a job."""
    signal.set_wakeup_fd(-1)  # the inherited one is the rank's
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)
    import multiprocessing

    parent = multiprocessing.parent_process()
    die_with_parent(parent.pid if parent else None)
