"""The nested regions of a trace: steps, their phases according to the clock, and the callbacks' hooks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from torch.profiler import record_function

from trainer.comm.phases import Phase


@dataclass
class Regions:
    """Opens and closes properly nested regions, as the listener of a clock.

    An interrupted phase continues around the one that interrupts it. Work on a device's gradient thread is not
    followed; it counts as the backward pass.
    """

    step: Callable[[], str]  # returns the name of the step that begins; "" once no step is recorded any more
    validate: Callable[[], None]  # called as a validation begins
    thread: int = field(default_factory=get_ident)
    open: list[tuple[Any, bool]] = field(default_factory=list)  # outermost first, and whether each is a phase

    def switch(self, phase: Phase) -> None:
        if phase == Phase.DATA:
            self.begin()
        elif self._follows():
            if self.open[-1][1]:
                self._close(len(self.open) - 1)
            self._enter(phase.name.lower(), True)

    def enter(self, phase: Phase) -> None:
        if phase == Phase.VALIDATION:
            self.validate()
        if self._follows():
            self._enter(phase.name.lower(), True)

    def leave(self) -> None:
        if self._follows():
            self._close(len(self.open) - 1)

    def begin(self) -> None:
        """End the step, and begin the next one, which first waits for data."""
        self.end()
        if name := self.step():
            self._enter(name, False)
            self._enter(Phase.DATA.name.lower(), True)

    def end(self) -> None:
        self._close(0)

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            before = len(self.open)
            self._enter(name, False)
            try:
                return call(*args, **options)
            finally:
                self._close(before)

        return run

    def _follows(self) -> bool:
        return bool(self.open) and get_ident() == self.thread

    def _enter(self, name: str, phase: bool) -> None:
        region = record_function(name)
        region.__enter__()
        self.open.append((region, phase))

    def _close(self, before: int) -> None:
        while len(self.open) > before:
            self.open.pop()[0].__exit__(None, None, None)
