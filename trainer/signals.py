"""What reaches a run from outside: requests to stop, and a terminal or pipe that is no longer there. No torch here."""

import contextlib
import io
import logging
import os
import signal
import socket
import sys
import threading

log = logging.getLogger("echelon")

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # the last by SLURM, before a job's time ends
SHOW_CURSOR = b"\x1b[?25h"


def heeded() -> list[signal.Signals]:
    """Those of `STOP` that a run acts on: under nohup SIGHUP is ignored, and stays so."""
    return [n for n in STOP if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def hold_usr1(held: bool) -> None:
    """SIGUSR1 waits while a run starts, which it would end: SLURM sends it to all processes of a job, at any time."""
    signal.pthread_sigmask(signal.SIG_BLOCK if held else signal.SIG_UNBLOCK, {signal.SIGUSR1})


class Signals:
    """While entered, the first signal to stop sets `name`; a SIGINT after that ends the process.

    A second SIGTERM does not: who ends a whole job sends one to the ranks, and their launcher passes on its own.

    A Python handler only runs between two bytecodes of the main thread, so not during a collective; the interpreter's
    wakeup descriptor is written at once, and a thread reads it. Outside the main thread it does nothing.
    """

    name = ""
    heard = ""  # the last of any in this process

    def __enter__(self) -> "Signals":
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._read, self._write = socket.socketpair()
            self._write.setblocking(False)
            self._fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
            self._handlers = {number: signal.signal(number, lambda *_: None) for number in heeded()}
            threading.Thread(target=self._watch, name="signals", daemon=True).start()
            hold_usr1(False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._main:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._fd)
            self._write.close()

    def _watch(self) -> None:
        while number := self._read.recv(1):
            if self.name and number[0] == signal.SIGINT:
                with contextlib.suppress(OSError):
                    print("echelon: second signal, stopping now, without a checkpoint", file=sys.stderr, flush=True)
                show_cursor()
                os._exit(128 + signal.SIGINT)
            if number[0] in STOP and not self.name:
                self.name = Signals.heard = signal.Signals(number[0]).name
                again = "; again stops now" if number[0] == signal.SIGINT else ""
                with contextlib.suppress(OSError):
                    log.info("%s: stopping after this step with a checkpoint%s", self.name, again)
        self._read.close()


def show_cursor() -> None:
    """A progress bar hides it, and a process that is ended at once can't put it back."""
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, SHOW_CURSOR + b"\r\n")


class Output(io.TextIOWrapper):
    """Standard output or error whose reader may go (`| head`, a closed ssh session): what follows is lost, no more.

    The log says so once. Python ignores SIGPIPE, so that a write raises instead.
    """

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())  # what is still buffered goes there
        os.close(null)
        log.info("%s is closed (%s): the run goes on, see metrics.jsonl and logs/", self.name, error.strerror)


def outlive_readers() -> None:
    """From now on `sys.stdout` and `sys.stderr` are `Output`; where a shell has closed one (`>&-`), nowhere."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        new = (
            open(os.devnull, "w")  # noqa: SIM115 it stays open
            if old is None
            else Output(old.buffer, old.encoding, old.errors, None, old.line_buffering, old.write_through)
        )
        setattr(sys, name, new)
