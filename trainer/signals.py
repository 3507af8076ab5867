"""Stop requests: SIGINT and SIGTERM, seen at once even while the main thread waits in a collective."""

import contextlib
import os
import signal
import socket
import sys
import threading

STOP = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """While entered, the first SIGINT or SIGTERM sets `name`; a SIGINT after that ends the process.

    A second SIGTERM does not: who ends a whole job sends one to the ranks, and their launcher passes on its own.

    A Python handler only runs between two bytecodes of the main thread, so not during a collective; the interpreter's
    wakeup descriptor is written at once, and a thread reads it. Outside the main thread it does nothing.
    """

    name = ""

    def __enter__(self) -> "Signals":
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._read, self._write = socket.socketpair()
            self._write.setblocking(False)
            self._fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
            self._handlers = {number: signal.signal(number, lambda *_: None) for number in STOP}
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
            if self.name and number[0] == signal.SIGINT:
                with contextlib.suppress(OSError):
                    print("echelon: second signal, stopping now, without a checkpoint", file=sys.stderr, flush=True)
                os._exit(128 + signal.SIGINT)
            if number[0] in STOP:
                self.name = signal.Signals(number[0]).name
        self._read.close()
