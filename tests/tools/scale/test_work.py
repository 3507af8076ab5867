"""Recipes are counted on the meta device."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.messages import refuses
from torch import nn

from trainer.errors import ConfigError
from trainer.tools.scale.machines import PRESETS, Cluster
from trainer.tools.scale.options import ScaleOptions
from trainer.tools.scale.work import count

H100, V100 = PRESETS["8xh100-8x400g"], PRESETS["8xv100-1x100g"]


class Counted:
    """Four blocks of 64 x 64 and a table of 1000 x 64."""

    flops_per_sample = 3e12
    tokens_per_sample = 10

    def model(self) -> nn.Module:
        blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        return nn.ModuleDict({"table": nn.Embedding(1000, 64), "blocks": blocks})


class Uncounted(Counted):
    flops_per_sample = 0.0


class Frozen(Counted):
    def model(self) -> nn.Module:
        model = super().model()
        model.get_submodule("table").requires_grad_(False)
        return model


class Reads(Counted):
    def model(self) -> nn.Module:
        rates = [rate.item() for rate in torch.arange(4) / 10]
        return nn.Sequential(*map(nn.Dropout, rates))


class Wrong(Counted):
    def model(self) -> nn.Module:
        raise TypeError("a mistake of the recipe")


ALL = 64_000 + 4 * 4096


def config(recipe: type = Counted, precision: str = "bf16", **optimizer: Any) -> dict[str, Any]:
    node = {"_target_": f"{__name__}.{recipe.__name__}"}
    own = {"_target_": "trainer.optim.factories.adamw", "_partial_": True, "groups": None, **optimizer}
    return {"recipe": node, "optimizer": own, "trainer": {"precision": precision, "allow_targets": [__name__]}}


def test_parameters_seconds_and_bytes() -> None:
    work = count(config(), H100, ScaleOptions(mfu=0.5, activation_mib=3))
    found = work.workload
    assert (work.precision, work.frozen_bytes, work.unknown) == ("bf16", 0.0, ())
    assert found.parameters == (64_000, *[4096] * 4) and found.shapes[0] == (1000, 64)
    seconds = 3e12 / (989.4e12 * 0.5)
    assert found.forward_s == pytest.approx(seconds / 3) and found.backward_s == pytest.approx(2 * seconds / 3)
    assert found.state_bytes == pytest.approx(16 * ALL, rel=1e-4) and found.activation_bytes == 3 * 2**20
    assert found.optimizer_s == pytest.approx(28 * ALL / 3.35e12, rel=1e-4)
    assert found.boundary_bytes == 10 * 64 * 2


def test_what_is_unknown_is_refused_with_the_way_out() -> None:
    way = r"give trainer\.precision=fp16 or tflops=NUMBER$"
    with refuses("recipe", "flops_per_sample", "flops=NUMBER"):
        count(config(Uncounted), H100, ScaleOptions())
    assert count(config(Uncounted), H100, ScaleOptions(flops=1e12)).workload.forward_s > 0
    with pytest.raises(ConfigError, match=rf"^trainer\.precision=bf16: the machine has a peak for fp32, fp16; {way}"):
        count(config(), V100, ScaleOptions())
    with pytest.raises(ConfigError, match="the machine has a peak for no precision; give tflops=NUMBER"):
        count(config(), replace(V100, tflops={}), ScaleOptions())


def test_a_model_that_needs_values_is_refused_and_another_error_keeps_its_traceback() -> None:
    way = "load weights by trainer.init_from, and compute numbers without torch"
    why = r"tensors have no values: Tensor\.item\(\) cannot be called on meta tensors"
    with pytest.raises(
        ConfigError, match=rf"^recipe\.model\(\): can't be built on the meta device, where {why}; {way}$"
    ):
        count(config(Reads), H100, ScaleOptions())
    with pytest.raises(TypeError, match="a mistake of the recipe"):
        count(config(Wrong), H100, ScaleOptions())


@pytest.mark.parametrize(
    ("machine", "precision"), [(H100, "bf16"), (V100, "fp16"), (replace(V100, auto="fp32"), "fp32")]
)
def test_auto_computes_in_what_a_run_takes_there(machine: Cluster, precision: str) -> None:
    work = count(config(precision="auto"), machine, ScaleOptions(mfu=1))
    assert work.precision == precision
    assert work.workload.forward_s == pytest.approx(1e12 / (machine.tflops[precision] * 1e12))


@pytest.mark.parametrize(
    ("optimizer", "tensors"),
    [
        ({"_target_": "trainer.optim.factories.sgd", "momentum": 0.9}, 1),
        ({"_target_": "torch.optim.SGD"}, 0),
        ({"_target_": "trainer.optim.factories.lars", "momentum": 0.9}, 1),
        ({"_target_": "torch.optim.Adam"}, 2),
        ({"_target_": "trainer.optim.factories.adamw8bit"}, 0.5),
        ({"_target_": "trainer.optim.factories.adafactor"}, 0.0),
        ({"_target_": "trainer.optim.muon.Muon"}, 2),  # of an embedding; 1 of a hidden matrix
    ],
)
def test_the_state_of_the_chosen_optimizer(optimizer: dict[str, Any], tensors: float) -> None:
    work = count(config(**optimizer), H100, ScaleOptions())
    assert work.workload.state_bytes == pytest.approx(4 * (2 + tensors) * ALL, rel=0.01)
    differs = "optimizer: its state is counted at 2 numbers a parameter, and some have 1"
    assert work.unknown == ((differs,) if "Muon" in optimizer["_target_"] else ())
    seconds = (12 + 8 * tensors) * ALL / H100.memory_bytes_per_s
    assert work.workload.optimizer_s == pytest.approx(seconds, rel=0.01)


class OwnOptimizer(Counted):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([model.get_submodule("table").weight], lr=0.1)


def test_the_state_of_an_optimizer_that_only_steps_its_recipes_model_is_said_to_be_unknown() -> None:
    work = count(config(OwnOptimizer, _target_="trainer.optim.factories.of_recipe"), H100, ScaleOptions())
    (line,) = work.unknown
    assert work.workload.state_bytes == 16 * ALL
    assert line.startswith("optimizer: its state is unknown (") and "two numbers a parameter" in line


@pytest.mark.parametrize(
    "frozen", [config(Frozen), config(groups=[{"match": "table.*", "freeze": True}])], ids=["recipe", "group"]
)
def test_frozen_parameters_have_no_gradient_and_no_state(frozen: dict[str, Any]) -> None:
    work = count(frozen, H100, ScaleOptions())
    assert work.workload.parameters == (4096,) * 4
    assert work.workload.state_bytes == pytest.approx(16 * 4 * 4096, rel=1e-4)
    assert work.frozen_bytes == 4 * 64_000
    assert work.unknown == ("memory: with 64,000 frozen parameters whole on each rank",)


def test_what_is_unknown_of_a_measured_machine_is_said() -> None:
    work = count(config(precision="bf16_params"), replace(H100, memory_bytes_per_s=0.0), ScaleOptions())
    assert (
        work.precision == "bf16"
        and work.workload.optimizer_s == 0
        and work.unknown
        == (
            "optimizer: its step takes 0 s, since the rate of the device's memory is unknown",
            "memory: without the copies that bf16_params keeps of the parameters",
        )
    )
