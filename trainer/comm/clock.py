"""Starts the clock that divides time among phases: host time, or a device's."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from threading import get_ident
from typing import Any

import torch

from trainer.comm.phases import Clock, Lap, Phase, during, running
from trainer.comm.watch import listen

MARKS = 1000  # unread CUDA events at most, unless the device is that far behind


class DeviceClock(Clock):
    """A clock of device time. CUDA events mark the training stream, and nothing waits for the device.

    While the device is behind the host, a phase that occupies only the host takes no device time.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.stream = device, torch.cuda.current_stream(device)
        self.free: list[Any] = []  # events that have been read
        self.marks: deque[tuple[Phase, Any, list[Lap]]] = deque()  # unread events, each with the phase that it ends
        self.last = self._event()

    def switch(self, phase: Phase, notify: bool = True) -> None:
        self.marks.append((self.phase, self._event(), []))
        self.phase = phase
        if len(self.marks) > MARKS:
            self.read()
        if notify and self.listener is not None:
            self.listener.switch(phase)

    def enters(self, phase: Phase) -> bool:
        """Return whether a call of this phase counts. Waits on other streams do not delay training."""
        return super().enters(phase) and torch.cuda.current_stream(self.device) == self.stream

    def lap(self) -> Lap:
        """Return a lap that ends now. If all events have been read, it is complete at once and needs no event."""
        lap = Lap()
        if self.marks:
            self.switch(self.phase, notify=False)
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


def start(device: torch.device, stack: ExitStack, now: Callable[[], float] = time.perf_counter) -> Clock:
    """Start this thread's clock, and return it. Each call needs a call of `stop`.

    `stack` stops watching torch's collectives when it closes. `now` is used on a CPU if no clock is running.
    """
    clock = running.clock
    if clock is None or clock.thread != get_ident():
        clock = running.clock = DeviceClock(device) if device.type == "cuda" else Clock(now)
    listen(count_waits, stack)
    clock.users += 1
    return clock


def stop(clock: Clock) -> None:
    clock.users -= 1
    if not clock.users and running.clock is clock:
        running.clock = None


def count_waits(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a torch function that waits for other ranks, so that it counts as communication.

    Synchronous collectives wait in `Work.wait` with gloo, and in the call itself with NCCL. Waits inside C++ are not
    seen, such as DDP's at the end of a backward pass.
    """
    return function if name == "isend" else during(Phase.COMMUNICATION)(function)
