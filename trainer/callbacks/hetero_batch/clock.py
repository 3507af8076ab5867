"""Times the computing of a rank's steps, without its waits for other ranks."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from trainer.data.batch import Step
from trainer.forward_backward import ForwardBackward
from trainer.parallel.strategy import Strategy


class ComputeClock:
    """Adds up the samples and the seconds of forward and backward passes.

    The clock stands still while the rank waits: for the agreement on the step, for buffers that DDP shares, and for the
    reduction of gradients. The engine runs callbacks in the order in which they were queued. A strategy queues its wait
    once it has a gradient, so a callback that is queued just before the first gradient runs before that wait.

    On CUDA, events mark the stream, and nothing waits for the device.

    Args:
        now: Seconds, on a CPU.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.monotonic) -> None:
        self.cuda, self.now = device.type == "cuda", now
        self.begun: Any = None  # the mark at which the running span began
        self.spans: list[tuple[Any, Any]] = []  # of this step
        self.steps: deque[tuple[int, list[tuple[Any, Any]]]] = deque()  # whose events may not have happened yet
        self.whole = True  # this step's passes have ended before their wait
        self.queued = False  # this backward pass has a gradient
        self.hooks: list[Any] = []

    def attach(self, strategy: Strategy, module: nn.Module) -> None:
        """Watch the ends of backward passes, and the buffers that are shared before forward passes."""
        self.strategy = strategy
        self.hooks += [p.register_hook(self._queue) for p in strategy.parameters]
        self.hooks.append(strategy.model.register_forward_pre_hook(lambda *_: self.pause(), prepend=True))
        self.hooks.append(module.register_forward_pre_hook(lambda *_: self.resume()))

    def detach(self) -> None:
        while self.hooks:  # a parameter's hook would keep the callback alive
            self.hooks.pop().remove()

    def timed(self, run: ForwardBackward, data: Step, total: Callable[[], int], samples: int) -> list[Tensor]:
        """Run the passes of a step, and time them."""
        if not self.hooks:  # DDP's part of the rehearsal
            return run(data, total)
        self.spans, self.whole, self.begun = [], True, None
        losses = run(Timed(data, self), lambda: self._agreed(total))
        if self.whole and self.spans:
            self.steps.append((samples, self.spans))
        return losses

    def take(self) -> tuple[int, float]:
        """Return the samples and the seconds of the steps that the device has finished, and forget them."""
        samples, seconds = 0, 0.0
        while self.steps and (not self.cuda or self.steps[0][1][-1][1].query()):
            count, spans = self.steps.popleft()
            samples += count
            seconds += sum(one.elapsed_time(other) / 1000 if self.cuda else other - one for one, other in spans)
        return samples, seconds

    def resume(self) -> None:
        if self.begun is None:
            self.begun = self._mark()

    def pause(self) -> None:
        if self.begun is not None:
            self.spans.append((self.begun, self._mark()))
            self.begun = None

    def end_pass(self) -> None:
        """Note that the backward pass has returned. If the clock still runs, the pass has waited with it running."""
        self.whole &= self.begun is None or not self.strategy.syncing
        self.queued = False
        self.pause()

    def _agreed(self, total: Callable[[], int]) -> int:
        self.pause()
        weight = total()
        self.resume()
        return weight

    def _queue(self, _: Tensor) -> None:
        if not self.queued:
            self.queued = True
            Variable._execution_engine.queue_callback(self.pause)  # pyright: ignore[reportAttributeAccessIssue]

    def _mark(self) -> Any:
        if not self.cuda:
            return self.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Timed(Step):
    """A step whose batches start the clock as they are given out."""

    def __init__(self, step: Step, clock: ComputeClock) -> None:
        self.step, self.clock, self.weights, self.reduces = step, clock, step.weights, step.reduces

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        for batch, weight in self.step:
            self.clock.resume()
            yield batch, weight
            del batch
            self.clock.end_pass()
