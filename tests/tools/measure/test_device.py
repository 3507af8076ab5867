"""Matrix products of each dtype that a CPU has; copies are a GPU's alone."""

import pytest
import torch

from trainer.tools.measure import device


def test_products_of_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CPU_SIZE", 32)
    monkeypatch.setattr(device, "BUDGET", 0.001)
    before = torch.get_float32_matmul_precision()
    rates = device.matmul(torch.device("cpu"))
    assert rates.keys() == {"fp32_flop_per_s", "bf16_flop_per_s", "fp16_flop_per_s"}
    assert all(rate > 0 for rate in rates.values())
    assert torch.get_float32_matmul_precision() == before


def test_a_rate_is_that_of_the_fastest_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that the calls turn: rounds take 2 s a call, but for one, which takes 1 s."""
    now, took = [0.0], iter([2.0, 2.0, 2.0, 1.0])
    monkeypatch.setattr(device, "time", type("Clock", (), {"perf_counter": lambda: now[0]}))
    assert device.fastest(lambda: now.__setitem__(0, now[0] + next(took)), torch.device("cpu")) == 1.0


def test_a_cpu_has_no_copies() -> None:
    assert device.copies(torch.device("cpu")) == {}
