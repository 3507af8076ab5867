"""Regions lie whole in one another, whatever the order in which phases and hooks come and go."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from trainer.comm.clock import start, stop
from trainer.comm.phases import Phase, during, switch
from trainer.monitors.profiler import regions as module
from trainer.monitors.profiler.regions import Regions


class Trace:
    """Stands for the profiler: begins and ends of regions, indented. Regions must end in the reverse of their order."""

    def __init__(self) -> None:
        self.lines, self.open = list[str](), list[str]()

    def record(self, name: str) -> Any:
        trace = self

        class Region:
            def __enter__(self) -> None:
                trace.lines.append("  " * len(trace.open) + name)
                trace.open.append(name)

            def __exit__(self, *_: object) -> None:
                assert trace.open.pop() == name

        return Region()

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Trace:
    trace = Trace()
    monkeypatch.setattr(module, "record_function", trace.record)
    return trace


class Ended(Exception):
    pass


@pytest.fixture
def regions(trace: Trace) -> Iterator[Regions]:
    """Follow a clock that runs, for two steps."""
    steps = iter(["step 1", "step 2", "", ""])

    def validate() -> None:
        regions.end()

    with ExitStack() as undo:
        clock = start(torch.device("cpu"), undo)
        clock.listener = regions = Regions(lambda: next(steps), validate)
        yield regions
        stop(clock)
    assert trace.open == []


def load() -> None:
    switch(Phase.DATA)
    switch(Phase.CALLBACKS)


wait = during(Phase.COMMUNICATION)(lambda: None)


def test_phases_follow_one_another_and_calls_lie_in_them(regions: Regions, trace: Trace) -> None:
    load()
    switch(Phase.FORWARD)
    wait()
    switch(Phase.BACKWARD)
    switch(Phase.OPTIMIZER)
    during(Phase.CALLBACKS)(regions.around("ema.on_step_end", wait))()
    switch(Phase.CALLBACKS)
    assert trace.take() == [
        "step 1", "  data", "  callbacks", "  forward", "    communication", "  backward", "  optimizer",
        "    callbacks", "      ema.on_step_end", "        communication", "  callbacks",
    ]  # fmt: skip
    load()
    assert trace.take() == ["step 2", "  data", "  callbacks"]
    load()
    switch(Phase.FORWARD)
    wait()
    assert trace.take() == [], "no step is recorded any more"


def test_a_phase_that_begins_in_a_hook_ends_with_the_hook(regions: Regions, trace: Trace) -> None:
    def hook() -> None:
        switch(Phase.FORWARD)
        switch(Phase.BACKWARD)
        raise Ended

    load()
    trace.take()
    with pytest.raises(Ended):
        during(Phase.OPTIMIZER)(regions.around("mine.on_step_end", hook))()
    assert trace.take() == ["    optimizer", "      mine.on_step_end", "        forward", "        backward"]
    assert trace.open == ["step 1", "callbacks"]
    regions.end()


def test_a_validation_ends_all_regions(regions: Regions, trace: Trace) -> None:
    load()
    during(Phase.VALIDATION)(wait)()
    assert trace.take() == ["step 1", "  data", "  callbacks"] and trace.open == []


def test_another_thread_changes_nothing(regions: Regions, trace: Trace) -> None:
    """A device has a thread for its gradients, and the clock follows that thread, too."""

    def gradients() -> None:
        regions.enter(Phase.COMMUNICATION)
        regions.leave()
        regions.switch(Phase.COMMUNICATION)

    load()
    switch(Phase.BACKWARD)
    trace.take()
    thread = threading.Thread(target=gradients)
    thread.start()
    thread.join()
    assert trace.take() == [] and trace.open == ["step 1", "backward"]
    regions.end()
