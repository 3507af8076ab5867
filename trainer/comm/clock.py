"""Starts the clock of the phases: of the host's time, or of a device's."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from threading import get_ident
from typing import Any

import torch

from trainer.comm.phases import Clock, Lap, Phase, during, running
from trainer.comm.watch import listen

MARKS = 1000  # CUDA events that wait to be read at most, unless the device is that far behind


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

    def switch(self, phase: Phase, tell: bool = True) -> None:
        self.marks.append((self.phase, self._event(), []))
        self.phase = phase
        if len(self.marks) > MARKS:
            self.read()
        if tell and self.listener is not None:
            self.listener.switch(phase)

    def enters(self, phase: Phase) -> bool:
        """Return whether a call of this phase counts. A wait of another stream keeps nobody waiting."""
        return super().enters(phase) and torch.cuda.current_stream(self.device) == self.stream

    def lap(self) -> Lap:
        """Return this moment. If all marks have been read, return that of the last one, which is no later event."""
        lap = Lap()
        if self.marks:
            self.switch(self.phase, tell=False)
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


def start(device: torch.device, undo: ExitStack, now: Callable[[], float] = time.perf_counter) -> Clock:
    """Return the clock of this thread, which runs from now on. Each call of `start` needs one of `stop`.

    Args:
        undo: Ends the clock's watch of torch's collectives.
        now: Seconds, on a CPU, if no clock runs yet.
    """
    clock = running.clock
    if clock is None or clock.thread != get_ident():
        clock = running.clock = DeviceClock(device) if device.type == "cuda" else Clock(now)
    listen(count_waits, undo)
    clock.users += 1
    return clock


def stop(clock: Clock) -> None:
    clock.users -= 1
    if not clock.users and running.clock is clock:
        running.clock = None


def count_waits(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of torch that waits for other ranks count as communication.

    A collective that is not asynchronous waits by `Work.wait` over gloo, and by itself over NCCL. The waits of C++ are
    not seen: DDP's at the end of a backward pass is one of them.
    """
    return function if name == "isend" else during(Phase.COMMUNICATION)(function)
