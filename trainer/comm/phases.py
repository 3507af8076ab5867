"""The phases of a step: functions that mark them, and the clock that divides this process's time among them."""

import time
from collections.abc import Callable
from enum import IntEnum
from functools import wraps
from threading import get_ident
from typing import ParamSpec, Protocol, TypeVar

from torch import Tensor
from torch.autograd import Variable

P = ParamSpec("P")
R = TypeVar("R")


class Phase(IntEnum):
    DATA = 0  # the wait for data
    UPLOAD = 1  # the wait for a copy to the device
    FORWARD = 2
    BACKWARD = 3
    COMMUNICATION = 4  # the wait for other ranks
    OPTIMIZER = 5  # clipping and the optimizer's step
    CALLBACKS = 6  # callbacks, and the loop itself
    CHECKPOINT = 7  # nothing interrupts this phase and the next, so their waits belong to them
    VALIDATION = 8


class Lap:
    """A point in time."""

    def __init__(self) -> None:
        self.seconds: list[float] = []  # of each phase since the clock started; empty until the device gets here


class Listener(Protocol):
    """Follows the phases of a clock. Also called by the autograd thread of a device."""

    def switch(self, phase: Phase) -> None: ...  # ends the current phase
    def enter(self, phase: Phase) -> None: ...  # a nested phase, after which the outer one resumes
    def leave(self) -> None: ...  # the innermost nested phase


class Clock:
    """Divides the time since its start among the phases. Every moment belongs to exactly one phase."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now, self.since, self.phase = now, now(), Phase.CALLBACKS
        self.seconds = [0.0] * len(Phase)
        self.users = 0
        self.listener: Listener | None = None
        self.thread = self.backward_thread = get_ident()  # a GPU's backward pass runs on autograd's own thread

    def switch(self, phase: Phase, notify: bool = True) -> None:
        """End the current phase and begin this one. `notify` calls the listener."""
        now = self.now()
        self.seconds[self.phase] += now - self.since
        self.since, self.phase = now, phase
        if notify and self.listener is not None:
            self.listener.switch(phase)

    def enters(self, phase: Phase) -> bool:
        """Return whether a call of this phase counts: not within itself, nor within a phase that nothing interrupts.

        Waits in other threads, such as those that reduce gradients, do not delay training.
        """
        if self.phase == phase or self.phase >= Phase.CHECKPOINT:
            return False
        return get_ident() in (self.thread, self.backward_thread)

    def end_backward(self, _: Tensor) -> None:
        """Count the end of the current backward pass as communication."""
        self.backward_thread = get_ident()
        Variable._execution_engine.queue_callback(self._wait)  # pyright: ignore[reportAttributeAccessIssue]

    def _wait(self) -> None:
        self.switch(Phase.COMMUNICATION)

    def lap(self) -> Lap:
        self.switch(self.phase, notify=False)
        lap = Lap()
        lap.seconds = self.seconds[:]
        return lap

    def read(self) -> None:
        """Read the times of the laps that the device has reached."""


class Running:
    __slots__ = ("clock",)

    def __init__(self) -> None:
        self.clock: Clock | None = None


running = Running()


def marker() -> Callable[[Phase], None] | None:
    """Return the function that begins a phase; None if no clock is running in this thread."""
    clock = running.clock
    return clock.switch if clock is not None and clock.thread == get_ident() else None


def switch(phase: Phase) -> None:
    if mark := marker():
        mark(phase)


def during(phase: Phase) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that its calls count as a phase, after which the outer phase resumes."""

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        @wraps(call, updated=())
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            clock = running.clock
            if clock is None or not clock.enters(phase):
                return call(*args, **kwargs)
            before, listener = clock.phase, clock.listener
            clock.switch(phase, notify=False)
            if listener is not None:
                listener.enter(phase)
            try:
                return call(*args, **kwargs)
            finally:
                if listener is not None:
                    listener.leave()
                clock.switch(before, notify=False)

        return run

    return decorate


def ends_with_wait(loss: Tensor) -> None:
    """Count the time after the last gradient of the backward pass of `loss` as communication.

    Autograd runs callbacks in the order in which they were queued. A strategy queues its wait when the first gradient
    is ready, so a callback that the loss queues runs before that wait.
    """
    clock = running.clock
    if clock is not None and clock.thread == get_ident():
        loss.register_hook(clock.end_backward)
