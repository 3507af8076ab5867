"""The phases of a step, and the clock that splits the time of this process among them."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from enum import IntEnum
from functools import partial, wraps
from threading import get_ident
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

P = ParamSpec("P")
R = TypeVar("R")

MARKS = 1000  # CUDA events that wait to be read at most, unless the device is that far behind


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


class Clock:
    """Splits the time since its start among the phases: each moment is in one phase, so the parts add up.

    Args:
        now: Seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now, self.since, self.phase = now, now(), Phase.CALLBACKS
        self.seconds = [0.0] * len(Phase)
        self.users = 0
        self.thread = self.backward_thread = get_ident()  # a device has a thread of its own for its gradients

    def switch(self, phase: Phase) -> None:
        now = self.now()
        self.seconds[self.phase] += now - self.since
        self.since, self.phase = now, phase

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
        Variable._execution_engine.queue_callback(  # pyright: ignore[reportAttributeAccessIssue]
            partial(self.switch, Phase.COMMUNICATION)
        )

    def lap(self) -> Lap:
        self.switch(self.phase)
        lap = Lap()
        lap.seconds = self.seconds[:]
        return lap

    def read(self) -> None:
        """Take the times of laps that the device has got to."""


class DeviceClock(Clock):
    """A clock of the device's time: CUDA events mark the stream of the training, and nothing waits for the device.

    While the device is behind, a phase that keeps the host busy takes no time of it.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.stream = device, torch.cuda.current_stream(device)
        self.free: list[Any] = []  # events that have been read
        self.marks: deque[tuple[Phase, Any, list[Lap]]] = deque()  # the phase that each event ends
        self.last = self._event()

    def switch(self, phase: Phase) -> None:
        self.marks.append((self.phase, self._event(), []))
        self.phase = phase
        if len(self.marks) > MARKS:
            self.read()

    def enters(self, phase: Phase) -> bool:
        """Return whether a call of this phase counts. A wait of another stream keeps nobody waiting."""
        return super().enters(phase) and torch.cuda.current_stream(self.device) == self.stream

    def lap(self) -> Lap:
        """Return this moment. If all marks have been read, return that of the last one, which is no later event."""
        lap = Lap()
        if self.marks:
            self.switch(self.phase)
            self.marks[-1][2].append(lap)
        else:
            lap.seconds = self.seconds[:]
        return lap

    def read(self) -> None:
        while self.marks and self.marks[0][1].query():
            phase, event, laps = self.marks.popleft()
            self.seconds[phase] += self.last.elapsed_time(event) / 1000
            self.free.append(self.last)
            self.last = event
            for lap in laps:
                lap.seconds = self.seconds[:]

    def _event(self) -> Any:
        event = self.free.pop() if self.free else torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event


class Running:
    """The clock of this process, or of one of its threads if several train."""

    __slots__ = ("clock",)

    def __init__(self) -> None:
        self.clock: Clock | None = None


running = Running()


def start(device: torch.device, undo: ExitStack, now: Callable[[], float] = time.perf_counter) -> Clock:
    """Return the clock of this thread, which runs from now on. Each call of `start` needs one of `stop`.

    Args:
        undo: Ends the watch of torch's waits.
        now: Seconds, on a CPU, if no clock runs yet.
    """
    clock = running.clock
    if clock is None or clock.thread != get_ident():
        clock = running.clock = DeviceClock(device) if device.type == "cuda" else Clock(now)
        watch_waits(undo)
    clock.users += 1
    return clock


def stop(clock: Clock) -> None:
    clock.users -= 1
    if not clock.users and running.clock is clock:
        running.clock = None


def switch(phase: Phase) -> None:
    """Begin a phase, if a clock runs."""
    clock = running.clock
    if clock is not None and clock.thread == get_ident():
        clock.switch(phase)


def during(phase: Phase) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function whose calls are a phase; then the phase before goes on. The first such call counts as a whole."""

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        @wraps(call, updated=())
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            clock = running.clock
            if clock is None or not clock.enters(phase):
                return call(*args, **kwargs)
            before = clock.phase
            clock.switch(phase)
            try:
                return call(*args, **kwargs)
            finally:
                clock.switch(before)

        return run

    return decorate


def begin_backward(loss: Tensor, reduces: bool) -> None:
    """Begin the backward pass of `loss`. If it reduces gradients, what follows the last gradient is communication.

    The engine runs callbacks in the order in which they were queued. A strategy queues its wait once it has a gradient,
    so a callback that the loss has queued runs before that wait.
    """
    clock = running.clock
    if clock is not None and clock.thread == get_ident():
        clock.switch(Phase.BACKWARD)
        if reduces:
            loss.register_hook(clock.end_backward)


# Where torch waits for other ranks. A collective that is not asynchronous waits by `Work.wait` over gloo, and by itself
# over NCCL. Older versions of torch lack some.
COLLECTIVES = (
    "all_reduce", "broadcast", "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single",
    "reduce_scatter_tensor", "all_to_all_single", "_broadcast_coalesced",
)  # fmt: skip


def watch_waits(undo: ExitStack) -> None:
    """Count the waits of torch's collectives as communication, until `undo`; also those that torch's own layouts make.

    The waits of C++ are not seen: DDP's at the end of a backward pass is one of them.
    """
    for owner, name in ((dist.Work, "wait"), *((dist, name) for name in COLLECTIVES if hasattr(dist, name))):
        wait = getattr(owner, name)
        undo.callback(setattr, owner, name, wait)
        setattr(owner, name, during(Phase.COMMUNICATION)(wait))
