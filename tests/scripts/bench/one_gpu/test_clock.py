"""Steps are timed after the warm ones."""

import pytest
import torch

from scripts.bench.one_gpu import clock as clocks
from scripts.bench.one_gpu.cells import Cell


def test_the_clock_times_the_steps_after_the_warm_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clocks.Clock(Cell("speed", warm=2, timed=4), torch.device("cpu"))
    seconds = [100.0, 10.0, 1.0, 2.0, 3.0, 4.0, 1000.0]  # of each step; the third to the sixth count
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: sum(seconds[: clock.steps]))
    for _ in seconds:
        clock.tick()
    assert clock.seconds == 2.5
