"""Loops in turns are timed apart, each on its own."""

import dataclasses
import time

import pytest
import torch

from scripts.bench.overhead import turns
from scripts.bench.overhead.turns import MLP, measure


def sleeper(seconds: float):
    def train(job) -> None:
        for _ in job.batches():
            time.sleep(seconds)

    return train


def test_loops_by_turns_are_timed_apart() -> None:
    began = time.perf_counter()
    runs = measure({"fast": sleeper(0.001), "slow": sleeper(0.003)}, MLP, rounds=4, warm=10)
    elapsed_us = (time.perf_counter() - began) * 1e6
    for name, sleep_us in (("fast", 1000), ("slow", 3000)):
        assert len(runs.turns[name]) == 4
        assert min(runs.values(name, "us")) > sleep_us
        assert min(runs.values(name, "cpu")) < sleep_us  # sleeping is no work
    assert sum(40 * sum(runs.values(name, "us")) for name in runs.turns) < elapsed_us  # no turn is counted twice


def test_on_a_device_a_turn_ends_when_the_device_is_through(monkeypatch: pytest.MonkeyPatch) -> None:
    task = dataclasses.replace(MLP, device=torch.device("meta"))
    seen, waits = set[str](), list[int]()

    def notes(job) -> None:
        model, _ = job.build()
        for taken, batch in enumerate(job.upload()):
            seen.update(tensor.device.type for tensor in (*batch.values(), *model.parameters()))
            progress[0] = taken + 1

    def wait(device: torch.device) -> None:
        waits.append(progress[0])
        time.sleep(0.01)

    progress = [0]
    monkeypatch.setattr(turns, "wait", wait)
    runs = measure({"loop": notes}, task, rounds=2, warm=10)
    assert seen == {"meta"} and waits == [10, 50, 60, 100]
    assert min(runs.values("loop", "us")) > 0.01 / 40 * 1e6 > max(runs.values("loop", "cpu"))


def test_a_loop_that_fails_is_an_error() -> None:
    def fail(job) -> None:
        next(iter(job.batches()))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure({"fails": fail, "fast": sleeper(0.0)}, MLP, rounds=2, warm=10)
