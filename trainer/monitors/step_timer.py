"""Splits the time of each step among its phases, and writes `step_times.jsonl` with the times of every rank."""

import json
import time
from collections.abc import Callable
from typing import Any

from trainer.callback import Callback, Role
from trainer.comm import clock
from trainer.comm.phases import Clock, Lap, Phase
from trainer.files import Appended

NAMES = [phase.name.lower() for phase in Phase]
COMPUTE = (Phase.UPLOAD, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


class StepTimer(Callback):
    """Adds `time/...`: mean seconds of a step and of its phases since the last logged step, over ranks.

    A clock is in one phase at a time, so the phases add up to the step. Communication is what the step waits for: a
    reduction that overlaps with a backward pass takes no time. On a GPU the times are the device's, by CUDA events.

    Several ranks are compared as well. `time/slowest_rank` is the rank that computes longest: upload, passes, and
    optimizer. `time/spread` is the longest of these times minus the shortest, as a share of the step. `time/data_max`
    is the longest wait for data of any rank. `time/communication_min` is the communication of the rank that waits
    least: about the transfer itself.
    """

    role = Role.MEASURE
    now: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.clock: Clock | None = None
        self.file: Appended | None = None
        self.saved = {"bytes": 0, "kept": ""}

    def on_fit_start(self, trainer) -> None:
        self.trainer = trainer
        self.clock = clock.start(trainer.device, trainer.undo, self.now)
        self.read, self.step = self.clock.lap(), trainer.step
        self.next: Lap | None = None  # up to which the times are being gathered
        if trainer.rank == 0:
            self.file = Appended(trainer.run_dir / "step_times.jsonl")
            self.file.go_on(self.saved)
        trainer.gathered.append((self._own, self._combine))

    def on_fit_end(self, trainer) -> None:
        if self.clock:
            clock.stop(self.clock)
        if self.file:
            self.file.close()

    def _own(self) -> list[float]:
        """Return the seconds of each phase since the last call; empty if the device is not that far yet."""
        assert self.clock
        self.clock.read()
        self.next = self.clock.lap()
        if not self.read.seconds or not self.next.seconds:
            return []
        return [end - begin for begin, end in zip(self.read.seconds, self.next.seconds, strict=True)]

    def _combine(self, ranks: list[list[float]]) -> dict[str, float]:
        steps = self.trainer.step - self.step
        if not steps or not all(ranks):
            return {}
        assert self.next
        self.read, self.step = self.next, self.trainer.step
        times = [[round(seconds / steps, 9) for seconds in each] for each in ranks]
        if self.file:
            each = [{"step": round(sum(own), 9), **dict(zip(NAMES, own, strict=True))} for own in times]
            self.file.write(f"{json.dumps({'step': self.step, 'steps': steps, 'ranks': each})}\n".encode())
        return metrics(times)

    def state_dict(self) -> dict[str, Any]:
        return self.saved if self.file is None else self.file.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state


def metrics(times: list[list[float]]) -> dict[str, float]:
    """Return the metrics, from each rank's seconds per phase.

    Waits for data don't make a rank slow: if equal ranks lack data, one waits for it and the others wait for that one.
    """
    ranks = len(times)
    work = [sum(each[phase] for phase in COMPUTE) for each in times]
    means = {f"time/{name}": sum(each) / ranks for name, each in zip(NAMES, zip(*times, strict=True), strict=True)}
    step = sum(map(sum, times)) / ranks
    if ranks == 1:
        return {"time/step": step, **means}
    return {
        "time/step": step,
        **means,
        "time/data_max": max(each[Phase.DATA] for each in times),
        "time/communication_min": min(each[Phase.COMMUNICATION] for each in times),
        "time/slowest_rank": work.index(max(work)),
        "time/spread": (max(work) - min(work)) / step if step else 0.0,
    }
