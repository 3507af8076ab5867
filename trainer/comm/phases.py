"""The phases of a step: functions that mark them, and the clock that splits the time of this process among them."""

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
    CHECKPOINT = 7  # this phase and the next have their own waits: nothing interrupts them
    VALIDATION = 8


class Lap:
    """A moment.

    Attributes:
        seconds: Of each phase, from the start of the clock up to the moment; empty until the device has got there.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []


class Listener(Protocol):
    """Follows the phases of a clock. It is also told by the thread that a device has for its gradients."""

    def switch(self, phase: Phase) -> None:
        """Take that the phase before has ended, and that this one begins."""

    def enter(self, phase: Phase) -> None:
        """Take that a call begins which is a phase. The phase before goes on after the call."""

    def leave(self) -> None:
        """Take that the call has ended which began last."""


class Clock:
    """Splits the time since its start among the phases: each moment is in one phase, so the parts add up.

    Args:
        now: Seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now, self.since, self.phase = now, now(), Phase.CALLBACKS
        self.seconds = [0.0] * len(Phase)
        self.users = 0
        self.listener: Listener | None = None
        self.thread = self.backward_thread = get_ident()  # a device has a thread of its own for its gradients

    def switch(self, phase: Phase, tell: bool = True) -> None:
        """End the current phase and begin this one.

        Args:
            tell: Tell the listener, too.
        """
        now = self.now()
        self.seconds[self.phase] += now - self.since
        self.since, self.phase = now, phase
        if tell and self.listener is not None:
            self.listener.switch(phase)

    def enters(self, phase: Phase) -> bool:
        """Return whether a call of this phase counts: not in the phase, nor in one that nothing interrupts.

        Waits of other threads, such as those that reduce, keep nobody waiting.
        """
        if self.phase == phase or self.phase >= Phase.CHECKPOINT:
            return False
        return get_ident() in (self.thread, self.backward_thread)

    def end_backward(self, _: Tensor) -> None:
        """Let the backward pass that has begun end with communication."""
        self.backward_thread = get_ident()
        Variable._execution_engine.queue_callback(self._wait)  # pyright: ignore[reportAttributeAccessIssue]

    def _wait(self) -> None:
        self.switch(Phase.COMMUNICATION)

    def lap(self) -> Lap:
        self.switch(self.phase, tell=False)
        lap = Lap()
        lap.seconds = self.seconds[:]
        return lap

    def read(self) -> None:
        """Take the times of laps that the device has got to."""


class Running:
    """The clock of this process, or of one of its threads if several train."""

    __slots__ = ("clock",)

    def __init__(self) -> None:
        self.clock: Clock | None = None


running = Running()


def marker() -> Callable[[Phase], None] | None:
    """Return the function that begins a phase; None if no clock runs in this thread."""
    clock = running.clock
    return clock.switch if clock is not None and clock.thread == get_ident() else None


def switch(phase: Phase) -> None:
    """Begin a phase, if a clock runs."""
    if mark := marker():
        mark(phase)


def during(phase: Phase) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function whose calls are a phase; then the phase before goes on. The first such call counts as a whole."""

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        @wraps(call, updated=())
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            clock = running.clock
            if clock is None or not clock.enters(phase):
                return call(*args, **kwargs)
            before, listener = clock.phase, clock.listener
            clock.switch(phase, tell=False)
            if listener is not None:
                listener.enter(phase)
            try:
                return call(*args, **kwargs)
            finally:
                if listener is not None:
                    listener.leave()
                clock.switch(before, tell=False)

        return run

    return decorate


def ends_with_wait(loss: Tensor) -> None:
    """Count what follows the last gradient of the backward pass of `loss` as communication: the pass reduces gradients.

    The engine runs callbacks in the order in which they were queued. A strategy queues its wait once it has a gradient,
    so a callback that the loss has queued runs before that wait.
    """
    clock = running.clock
    if clock is not None and clock.thread == get_ident():
        loss.register_hook(clock.end_backward)
