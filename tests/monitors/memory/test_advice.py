"""Bytes counted by hand, and what the advice says that a setting takes away."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from trainer.monitors.memory.advice import Setting, Use, advise, count_state, size
from trainer.monitors.memory.allocator import GIB
from trainer.precision.rounding import round_steps

USE = Use(peak=70 * GIB, weights=2 * GIB, gradients=2 * GIB, state=4 * GIB, expected=False, limit=80 * GIB)
ALONE = Setting(16, "bf16", True, "AdamW", {"'+callbacks=[one]'": 59.0 * GIB, "none": 0.0}, [], ["adamw", "adamw8bit"])
NODE = replace(ALONE, finds=["'+callbacks=[fits]'"])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))  # 36 and 10 parameters


def test_shared_storage_counts_once():
    module = net()
    assert size(module.parameters()) == 46 * 4
    tied = nn.ModuleList([module, nn.Linear(8, 4)])
    tied[1].weight = module.get_submodule("0").weight
    assert size([p for part in tied for p in part.parameters()]) == (46 + 4) * 4
    assert size(module.double().parameters()) == 46 * 8
    assert size([]) == 0


@pytest.mark.parametrize(
    ("optimizer", "computed", "held"),
    [
        (torch.optim.AdamW, 2 * 46 * 4, 2 * 46 * 4 + 4 * 4),  # and a counter for each of 4
        (lambda params: torch.optim.SGD(params, momentum=0.9), 46 * 4, 46 * 4),
        (torch.optim.SGD, 0, 0),
        (lambda params: torch.optim.Adam(params, amsgrad=True), 3 * 46 * 4, 3 * 46 * 4 + 4 * 4),
    ],
)
def test_state_is_counted_after_a_step_and_computed_before(optimizer, computed, held):
    module = net()
    chosen, parameters = optimizer(module.parameters()), list(module.parameters())

    def count() -> tuple[int, bool]:
        return count_state(chosen, parameters, lambda probe: optimizer(probe.parameters()))

    assert count() == (computed, True)
    module(torch.ones(3, 8)).sum().backward()
    chosen.step()
    assert count() == (held, held == 0)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters())


def test_weights_in_bf16_have_float32_state():
    module = net().bfloat16()
    chosen, parameters = adamw(module), list(module.parameters())
    computed, expected = count_state(chosen, parameters, adamw)
    assert expected and computed == 2 * 46 * 4
    for p in parameters:
        p.grad = torch.zeros_like(p)
    round_steps(chosen, module, seed=0, step=lambda: 0).step()
    assert count_state(chosen, parameters, adamw) == (computed + 4 * 4, False)
    double = net().double()
    assert count_state(adamw(double), list(double.parameters()), adamw)[0] == 2 * 46 * 8


def test_the_state_of_an_optimizer_that_steps_one_model_alone_is_not_predicted():
    module = net()
    chosen = adamw(module)
    assert count_state(chosen, list(module.parameters()), lambda probe: adamw(probe.get_submodule("0"))) == (0, True)


def test_what_is_neither_weights_nor_gradients_nor_state_is_the_rest():
    assert USE.rest == 62 * GIB
    assert replace(USE, expected=True).rest == 66 * GIB  # a state to come is not in the peak
    assert replace(USE, peak=GIB).rest == 0
    assert str(USE) == (
        "peak 70.00 of 80.00 GiB (weights 2.00, gradients 2.00, optimizer 4.00, activations and the rest 62.00)"
    )
    assert str(replace(USE, limit=0, expected=True)).startswith(
        "peak 70.00 GiB (weights 2.00, gradients 2.00, optimize"
    )


def test_the_most_effective_setting_comes_first_with_its_bytes():
    assert advise(USE, NODE) == (
        "'+callbacks=[one]' (up to 59.00 GiB less), micro_batch=8, with the same batch (up to 31.00 GiB less), "
        "optimizer=adamw8bit (up to 2.98 GiB less), '+callbacks=[fits]' (finds micro_batch itself)"
    )
    bare = replace(ALONE, saved={}, optimizer="SGD")
    assert advise(USE, replace(bare, micro=3)) == "micro_batch=1, with the same batch (up to 41.33 GiB less)"
    fp32 = replace(bare, precision="fp32", micro=1)
    assert advise(USE, fp32) == "trainer.precision=bf16 (up to 31.00 GiB less)"
    assert advise(USE, replace(fp32, cuda=False)) == "a smaller model"


def test_a_setting_that_saves_next_to_nothing_is_not_named():
    small = replace(USE, state=GIB // 4)
    assert "adamw8bit" not in advise(small, NODE)
