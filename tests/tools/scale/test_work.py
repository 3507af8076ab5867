"""Recipes are counted on the meta device."""

from typing import Any

import pytest
from torch import nn

from trainer.errors import ConfigError
from trainer.tools.scale.machines import PRESETS
from trainer.tools.scale.options import ScaleOptions
from trainer.tools.scale.work import workload

H100 = PRESETS["8xh100-8x400g"]


class Counted:
    """Four blocks of 64 x 64 and a table of 1000 x 64."""

    flops_per_sample = 3e12
    tokens_per_sample = 10

    def model(self) -> nn.Module:
        blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        return nn.ModuleDict({"table": nn.Embedding(1000, 64), "blocks": blocks})


class Uncounted(Counted):
    flops_per_sample = 0.0


def config(recipe: type = Counted, precision: str = "bf16") -> dict[str, Any]:
    node = {"_target_": f"{__name__}.{recipe.__name__}"}
    return {"recipe": node, "trainer": {"precision": precision, "allow_targets": [__name__]}}


def test_parameters_seconds_and_bytes() -> None:
    found = workload(config(), H100, ScaleOptions(mfu=0.5, activation_mib=3))
    assert found.parameters == (64_000, *[4096] * 4) and found.shapes[0] == (1000, 64)
    seconds = 3e12 / (989.4e12 * 0.5)
    assert found.forward_s == pytest.approx(seconds / 3) and found.backward_s == pytest.approx(2 * seconds / 3)
    assert found.state_bytes == 16 * (64_000 + 4 * 4096) and found.activation_bytes == 3 * 2**20
    assert found.optimizer_s == pytest.approx(28 * (64_000 + 4 * 4096) / 3.35e12)
    assert found.boundary_bytes == 10 * 64 * 2


def test_what_is_unknown_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="has no flops_per_sample; define the number, or give flops=NUMBER"):
        workload(config(Uncounted), H100, ScaleOptions())
    assert workload(config(Uncounted), H100, ScaleOptions(flops=1e12)).forward_s > 0
    with pytest.raises(ConfigError, match="the machine has a peak for fp32, fp16; give tflops=NUMBER"):
        workload(config(), PRESETS["8xv100-1x100g"], ScaleOptions())
