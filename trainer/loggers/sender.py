"""Makes a logger's calls on a separate thread, so that an unreachable server neither delays nor ends training."""

import sys
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from trainer import timeouts
from trainer.context import Context
from trainer.errors import printable
from trainer.log import log
from trainer.loggers.logger import Logger
from trainer.metrics.media import Histogram, Image, prepared

MOST = 10_000  # most calls that are queued while the server is unreachable


class Sender:
    """Makes calls in order on a thread, and retries a call that failed because the server is unreachable.

    Each kind of problem is logged once: calls that wait, were refused, or were lost.

    Args:
        name: The logger's name, for messages.
        is_away: Returns whether a call's error may be temporary. Calls with other errors are dropped.
    """

    def __init__(self, name: str, is_away: Callable[[Exception], bool]) -> None:
        self.name, self.is_away = name, is_away
        self.calls: deque[Callable[[], object]] = deque()
        self.changed = threading.Condition()
        self.until = 0.0  # the time of the last try; 0: the run has not ended
        self.troubles: set[str] = set()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, call: Callable[[], object]) -> None:
        with self.changed:
            lost = len(self.calls) >= MOST
            if not lost:
                self.calls.append(call)
                self.changed.notify()
        if lost:
            self._report("lost", f"more than {MOST} writes wait; new ones are lost")
        if not self.thread.ident:
            self.thread.start()

    def close(self) -> None:
        """Wait at most `timeouts.LOGGER_S` for the queued calls."""
        if not self.thread.ident:
            return
        with self.changed:
            self.until = time.monotonic() + timeouts.LOGGER_S
            self.changed.notify()
        self.thread.join(timeouts.LOGGER_S)
        if self.calls:
            self._report("end", f"{len(self.calls)} writes did not arrive before the end of the run")

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.calls or self.until)
                if not self.calls:
                    return
            if not self._call() and not self._pause():
                return

    def _pause(self) -> bool:
        """Wait before a retry; return whether there is time for one."""
        with self.changed:
            if self.changed.wait_for(lambda: self.until, 0 if self.until else timeouts.LOGGER_PAUSE_S):
                left = self.until - time.monotonic()
                self.changed.wait(min(timeouts.LOGGER_PAUSE_S, max(left, 0)))
                return left > 0
        return True

    def _call(self) -> bool:
        """Make the first call; return False if it must be retried."""
        try:
            self.calls[0]()
        except Exception as error:
            reason = printable(" ".join(str(error).split()))[:300] or type(error).__name__
            if self.is_away(error):
                self._report("away", f"{reason}; training continues, and writes wait until there is an answer")
                return False
            self._report("refused", f"{reason}; training continues, and this is left out")
        else:
            if "away" in self.troubles:
                self.troubles.discard("away")
                log.info("%s: answers again", self.name)
        self.calls.popleft()
        return True

    def _report(self, trouble: str, text: str) -> None:
        if trouble not in self.troubles:
            self.troubles.add(trouble)
            log.warning("%s: %s", self.name, text)


class SendingLogger(Logger):
    """A logger whose calls are made by a `Sender`. Its own run starts with the first call."""

    sender: Sender | None = None

    @abstractmethod
    def begin(self, trainer: Context) -> Sender:
        """Return a sender whose first call starts the run."""

    @abstractmethod
    def log_numbers(self, numbers: dict[str, float], step: int, seconds: float) -> None:
        """Send the numbers of a step; `seconds` is the time since 1970."""

    @abstractmethod
    def log_item(self, name: str, item: str | Image | Histogram, step: int) -> None:
        """Send a text, an image or a histogram."""

    @abstractmethod
    def end(self, failed: bool, stopped: bool) -> None:
        """End the logger's run: the run has failed, was stopped by a signal, or is complete."""

    def on_fit_end(self, trainer) -> None:
        if self.sender is not None:
            self.sender.put(partial(self.end, bool(sys.exc_info()[1]), trainer.stop_reason == "signal"))
            self.sender.close()

    def write(self, trainer: Context, numbers: dict[str, float]) -> None:
        self._put(trainer, partial(self.log_numbers, dict(numbers), trainer.step, time.time()))

    def on_media(self, trainer, media: Mapping[str, Any]) -> None:
        if trainer.rank == 0:
            for name, item in prepared(media):
                self._put(trainer, partial(self.log_item, name, item, trainer.step))

    def _put(self, trainer: Context, call: Callable[[], object]) -> None:
        if self.sender is None:
            self.sender = self.begin(trainer)
        self.sender.put(call)
