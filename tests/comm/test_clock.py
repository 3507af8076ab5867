"""One clock for all that measure in a thread; on a device, nothing waits for it."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer.comm import clock as clocks
from trainer.comm import phases
from trainer.comm.clock import DeviceClock, start, stop
from trainer.comm.phases import Phase, during, ends_with_wait, running, switch

CPU = torch.device("cpu")


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as undo:
        yield undo


def test_two_that_measure_share_one_clock_and_the_last_one_ends_it() -> None:
    wait, reduce = dist.Work.wait, dist.all_reduce
    with ExitStack() as undo:
        first, second = start(CPU, undo), start(CPU, undo, lambda: 0.0)
        assert first is second and dist.Work.wait is not wait and dist.all_reduce is not reduce
        stop(first)
        assert running.clock is second
        stop(second)
        assert running.clock is None
    assert dist.Work.wait is wait and dist.all_reduce is reduce


def test_the_watch_of_waits_lasts_as_long_as_somebody_measures() -> None:
    """Also if the one that began is the first to end."""
    wait = dist.Work.wait
    with ExitStack() as second:
        with ExitStack() as first:
            clock = start(CPU, first)
            assert start(CPU, second) is clock
            stop(clock)
        assert dist.Work.wait is not wait
        stop(clock)
    assert dist.Work.wait is wait


def test_another_thread_that_trains_has_a_clock_of_its_own(undo: ExitStack) -> None:
    clock = start(CPU, undo)

    def train() -> None:
        other = start(CPU, undo)
        assert other is not clock and running.clock is other
        stop(other)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert running.clock is None
    stop(clock)


class Device:
    """A device that gets to what is enqueued when the test says so: cuda=fake."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.host, self.done, self.made = 0.0, 0.0, 0  # milliseconds
        self.stream: Any = "training"
        device = self

        class Event:
            at: float

            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                device.made += 1

            def record(self, stream: str) -> None:
                assert stream == "training"
                self.at = device.host

            def query(self) -> bool:
                return self.at <= device.done

            def elapsed_time(self, other: Any) -> float:
                assert self.query() and other.query(), "would be an error of CUDA"
                return other.at - self.at

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda device: self.stream)

    def enqueue(self, milliseconds: float) -> None:
        self.host += milliseconds


def test_a_device_is_never_waited_for(monkeypatch: pytest.MonkeyPatch, undo: ExitStack) -> None:
    device = Device(monkeypatch)
    clock = start(torch.device("cuda", 0), undo)
    assert isinstance(clock, DeviceClock)
    try:
        laps = []
        for _ in range(2):
            switch(Phase.FORWARD)
            device.enqueue(3)
            switch(Phase.BACKWARD)
            device.enqueue(5)
            during(Phase.COMMUNICATION)(device.enqueue)(7)
            laps.append(clock.lap())
        clock.read()
        assert [lap.seconds for lap in laps] == [[], []]
        device.done = 15
        clock.read()
        assert laps[0].seconds[Phase.FORWARD] == 0.003 and not laps[1].seconds
        device.done = 30
        clock.read()
        first, second = ({phase.name: s for phase, s in zip(Phase, lap.seconds, strict=True) if s} for lap in laps)
        assert first == {"FORWARD": 0.003, "BACKWARD": 0.005, "COMMUNICATION": 0.007}
        assert second == pytest.approx({name: 2 * seconds for name, seconds in first.items()})
        assert clock.lap().seconds == laps[1].seconds  # the device has nothing left to do
        made = device.made
        for _ in range(10):  # events are used again
            switch(Phase.DATA)
        assert device.made == made
    finally:
        stop(clock)


def test_events_are_read_long_before_a_logged_step(monkeypatch: pytest.MonkeyPatch, undo: ExitStack) -> None:
    device = Device(monkeypatch)
    clock = start(torch.device("cuda", 0), undo)
    try:
        for _ in range(5000):
            device.enqueue(1)
            switch(Phase.FORWARD)
            device.done = device.host - 10
        assert device.made <= clocks.MARKS + 20
        device.done = device.host
        clock.read()
        assert sum(clock.seconds) == pytest.approx(5.0)
    finally:
        stop(clock)


def test_a_wait_of_another_stream_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch, undo: ExitStack) -> None:
    device = Device(monkeypatch)
    clock = start(torch.device("cuda", 0), undo)
    try:
        device.stream = "reduction"
        during(Phase.COMMUNICATION)(device.enqueue)(7)
        device.stream, device.done = "training", 7
        clock.switch(Phase.DATA)
        clock.read()
        assert clock.seconds[Phase.CALLBACKS] == 0.007 and not clock.seconds[Phase.COMMUNICATION]
    finally:
        stop(clock)


def test_the_waits_of_a_device_s_thread_for_gradients_count(monkeypatch: pytest.MonkeyPatch, undo: ExitStack) -> None:
    """The hooks of a loss run in that thread, then what was queued."""
    device, queued = Device(monkeypatch), list[Any]()
    engine = SimpleNamespace(queue_callback=queued.append)
    monkeypatch.setattr(phases.Variable, "_execution_engine", engine)
    clock, hooks = start(torch.device("cuda", 0), undo), list[Any]()
    try:
        switch(Phase.BACKWARD)
        ends_with_wait(SimpleNamespace(register_hook=hooks.append))  # pyright: ignore[reportArgumentType]

        def run() -> None:
            hooks[0](None)
            device.enqueue(4)
            during(Phase.COMMUNICATION)(device.enqueue)(8)
            queued[0]()
            device.enqueue(16)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        device.done = 28
        clock.switch(Phase.OPTIMIZER)
        clock.read()
        found = {phase.name: s for phase, s in zip(Phase, clock.seconds, strict=True) if s}
        assert found == {"BACKWARD": 0.004, "COMMUNICATION": 0.024}
    finally:
        stop(clock)
