"""The device that a rank trains on."""

import pytest
import torch

from scripts.bench.overhead.steps import device


def test_two_ranks_are_on_two_gpus_or_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, alone, second in ((0, "cpu", "cpu"), (1, "cuda:0", "cpu"), (2, "cuda:0", "cuda:1")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert [str(device()), str(device(1, 2))] == [alone, second]
