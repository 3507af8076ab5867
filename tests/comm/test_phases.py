"""The phases, on times of the test's own: parts add up, and a listener is told of calls within calls."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from trainer.comm.clock import start, stop
from trainer.comm.phases import Clock, Phase, during, ends_with_wait, switch
from trainer.comm.reduce import Background
from trainer.data.batch import Micro, Step
from trainer.data.device_prefetch import Upload

NOW = [0.0]
CPU = torch.device("cpu")


@pytest.fixture
def clock() -> Iterator[Clock]:
    NOW[0] = 100.0
    with ExitStack() as undo:
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
        switch(Phase.BACKWARD)
        if reduces:
            ends_with_wait(loss)
        loss.backward()
        took = [after - was for after, was in zip(clock.lap().seconds, before, strict=True)]
        assert {phase.name: seconds for phase, seconds in zip(Phase, took, strict=True) if seconds} == found


def test_a_wait_for_an_upload_counts_and_a_batch_that_is_there_does_not(clock: Clock, monkeypatch) -> None:
    monkeypatch.setattr(Upload, "begin", lambda self: None)
    monkeypatch.setattr(Upload, "wait", lambda self: work(3))
    late: Any = Upload("late", None)  # pyright: ignore[reportArgumentType]
    assert [batch for batch, _ in Step([Micro("there", 1, [], []), Micro(late, 1, [], [])])] == ["there", "late"]
    assert spent(clock) == {"UPLOAD": 3}


class Told:
    """A listener that notes what it is told, indented by the calls around it."""

    def __init__(self) -> None:
        self.lines, self.depth = list[str](), 0

    def switch(self, phase: Phase) -> None:
        self.lines.append("  " * self.depth + phase.name)

    def enter(self, phase: Phase) -> None:
        self.depth += 1
        self.switch(phase)

    def leave(self) -> None:
        self.depth -= 1


def test_a_listener_is_told_of_calls_within_calls(clock: Clock) -> None:
    """A call that does not count is not told, nor is a lap. A call that raises has ended, too."""
    clock.listener = told = Told()
    switch(Phase.FORWARD)
    waited = during(Phase.COMMUNICATION)(work)
    during(Phase.OPTIMIZER)(during(Phase.OPTIMIZER)(waited))(1)
    clock.lap()
    with pytest.raises(ZeroDivisionError):
        during(Phase.DATA)(lambda: 1 / 0)()
    loss = nn.Linear(2, 1)(torch.ones(3, 2)).sum()
    switch(Phase.BACKWARD)
    ends_with_wait(loss)
    loss.backward()
    clock.listener = None
    switch(Phase.CALLBACKS)
    assert told.lines == ["FORWARD", "  OPTIMIZER", "    COMMUNICATION", "  DATA", "BACKWARD", "COMMUNICATION"]
    assert told.depth == 0


def test_a_listener_that_comes_or_goes_during_a_call_is_told_of_no_half(clock: Clock) -> None:
    first, second = Told(), Told()

    def change() -> None:
        clock.listener = second

    clock.listener = first
    during(Phase.DATA)(change)()
    assert (first.lines, first.depth) == (["  DATA"], 0) and (second.lines, second.depth) == ([], 0)
