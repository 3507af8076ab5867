"""The clock of the phases, on times of the test's own: parts add up, and nothing waits for the device."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainer.comm import phases
from trainer.comm.phases import Clock, DeviceClock, Phase, begin_backward, during, running, start, stop, switch
from trainer.comm.reduce import Background
from trainer.data.batch import Micro, Step
from trainer.data.device_prefetch import Upload

NOW = [0.0]
CPU = torch.device("cpu")


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as undo:
        yield undo


@pytest.fixture
def clock(undo: ExitStack) -> Iterator[Clock]:
    NOW[0] = 100.0
    clock = start(CPU, undo, lambda: NOW[0])
    yield clock
    stop(clock)


def spent(clock: Clock) -> dict[str, float]:
    return {phase.name: seconds for phase, seconds in zip(Phase, clock.lap().seconds, strict=True) if seconds}


def work(seconds: float) -> None:
    NOW[0] += seconds


def test_each_moment_is_in_one_phase(clock: Clock) -> None:
    work(1)
    switch(Phase.FORWARD)
    work(2)
    during(Phase.COMMUNICATION)(work)(4)
    work(8)
    assert spent(clock) == {"CALLBACKS": 1, "FORWARD": 10, "COMMUNICATION": 4}
    assert sum(clock.lap().seconds) == NOW[0] - 100


def test_a_wait_inside_of_a_wait_counts_once_and_an_error_ends_its_phase(clock: Clock) -> None:
    def wait() -> None:
        work(1)
        during(Phase.COMMUNICATION)(work)(2)
        raise ValueError

    with pytest.raises(ValueError):
        during(Phase.COMMUNICATION)(wait)()
    work(4)
    assert spent(clock) == {"COMMUNICATION": 3, "CALLBACKS": 4}


@pytest.mark.parametrize("phase", [Phase.CHECKPOINT, Phase.VALIDATION])
def test_checkpoints_and_validations_have_their_own_waits(clock: Clock, phase: Phase) -> None:
    def whole() -> None:
        work(1)
        for inner in Phase:
            during(inner)(work)(2)

    during(phase)(whole)()
    assert spent(clock) == {phase.name: 1 + 2 * len(Phase)}


def test_other_threads_switch_nothing(clock: Clock) -> None:
    """A wait of the thread that reduces keeps nobody waiting, but the wait for its result does."""
    background = Background(CPU)
    waited = during(Phase.OPTIMIZER)(work)
    assert background.submit(lambda: (waited(3), switch(Phase.DATA), torch.tensor(1))[-1]).wait()
    assert spent(clock).keys() <= {"CALLBACKS", "COMMUNICATION"} and clock.phase == Phase.CALLBACKS
    before = clock.lap().seconds[Phase.COMMUNICATION]
    gate = threading.Event()
    done = background.submit(lambda: torch.tensor(float(gate.wait(20))))
    opener = threading.Thread(target=lambda: (_until(clock, Phase.COMMUNICATION), work(5), gate.set()))
    opener.start()
    assert done.wait() == 1.0
    opener.join()
    assert clock.lap().seconds[Phase.COMMUNICATION] == before + 5


def _until(clock: Clock, phase: Phase) -> None:
    while clock.phase != phase:
        time.sleep(0.001)


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


def test_another_thread_that_trains_has_a_clock_of_its_own(clock: Clock, undo: ExitStack) -> None:
    def train() -> None:
        other = start(CPU, undo, lambda: NOW[0])
        assert other is not clock and running.clock is other
        stop(other)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert running.clock is None


def test_what_follows_the_last_gradient_is_a_wait_only_if_the_pass_reduces(clock: Clock) -> None:
    """A strategy queues its wait from the hook of a gradient, as DDP does."""
    model = nn.Linear(2, 1)

    def queue(_: Any) -> None:
        work(2)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: work(100))  # pyright: ignore

    model.weight.register_hook(queue)
    for reduces, found in ((True, {"BACKWARD": 2, "COMMUNICATION": 100}), (False, {"BACKWARD": 102})):
        before = clock.lap().seconds
        loss = model(torch.ones(3, 2)).sum()
        begin_backward(loss, reduces)
        loss.backward()
        took = [after - was for after, was in zip(clock.lap().seconds, before, strict=True)]
        assert {phase.name: seconds for phase, seconds in zip(Phase, took, strict=True) if seconds} == found


def test_a_wait_for_an_upload_counts_and_a_batch_that_is_there_does_not(clock: Clock, monkeypatch) -> None:
    monkeypatch.setattr(Upload, "begin", lambda self: None)
    monkeypatch.setattr(Upload, "wait", lambda self: work(3))
    late: Any = Upload("late", None)  # pyright: ignore[reportArgumentType]
    assert [batch for batch, _ in Step([Micro("there", 1, [], []), Micro(late, 1, [], [])])] == ["there", "late"]
    assert spent(clock) == {"UPLOAD": 3}


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
        assert device.made <= phases.MARKS + 20
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
        begin_backward(SimpleNamespace(register_hook=hooks.append), True)  # pyright: ignore[reportArgumentType]

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


def test_waits_of_torch_that_are_missing_in_a_version_are_left_out(monkeypatch, undo: ExitStack) -> None:
    monkeypatch.delattr(dist, "all_gather_single", raising=False)
    phases.watch_waits(undo)
    assert not hasattr(dist, "all_gather_single")
