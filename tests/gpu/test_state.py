"""Optimizers whose state is on the device go on bit for bit after a save."""

from pathlib import Path

import pytest
import torch
from support.gpu import DEVICE, ON_GPU, on_device
from support.optimizers import OPTIMIZERS, goes_on

pytestmark = on_device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(
    tmp_path: Path, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, dtype, ON_GPU) == ("sgd-fused", torch.bfloat16, False):
        pytest.skip("torch 2.13 doesn't update such parameters on a CPU (pytorch#191763)")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    goes_on(tmp_path, name, dtype, DEVICE)
