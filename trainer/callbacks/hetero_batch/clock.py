"""Times a rank's computation per step, excluding its waits for other ranks."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor

from trainer.comm import clock
from trainer.comm.phases import Clock, Lap, Phase
from trainer.data.batch import Step
from trainer.parallel.forward_backward import ForwardBackward


class ComputeClock:
    """Accumulates the samples and seconds of forward and backward passes, using the clock of the step's phases."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.monotonic) -> None:
        self.device, self.now = device, now
        self.clock: Clock | None = None
        self.steps: deque[tuple[int, Lap, Lap]] = deque()  # samples, begin, end; the device may not have reached them

    def attach(self, stack: ExitStack) -> None:
        """Start counting, until `detach` and until `stack` closes."""
        self.clock = clock.start(self.device, stack, self.now)

    def detach(self) -> None:
        if self.clock:
            clock.stop(self.clock)
        self.clock = None

    def timed(self, run: ForwardBackward, data: Step, total: Callable[[], int], samples: int) -> list[Tensor]:
        if not self.clock:  # DDP's part of the rehearsal
            return run(data, total)
        begin = self.clock.lap()
        losses = run(data, total)
        self.steps.append((samples, begin, self.clock.lap()))
        return losses

    def take(self) -> tuple[int, float]:
        """Return the samples and seconds of the steps that the device has finished, and reset both."""
        samples, seconds = 0, 0.0
        if self.clock:
            self.clock.read()
        while self.steps and self.steps[0][2].seconds:
            count, begin, end = self.steps.popleft()
            samples += count
            seconds += sum(end.seconds[phase] - begin.seconds[phase] for phase in (Phase.FORWARD, Phase.BACKWARD))
        return samples, seconds
