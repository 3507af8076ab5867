"""What recomputing costs and saves, counted; the same bits; and which blocks."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.messages import refuses
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.composition import arrange
from trainer.errors import ConfigError
from trainer.parallel.blocks import find_blocks

BATCH, WIDTH, DEPTH = 6, 16, 4
STAND_IN: Any = SimpleNamespace(recipe=None, device=torch.device("cpu"), callbacks={})  # for wrap_model
BLOCK_FLOPS = 2 * BATCH * WIDTH * WIDTH  # of a block's forward pass: one matrix product


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Toy(width=WIDTH, depth=DEPTH, dropout=dropout).model()


def wrapped(net: nn.Module, **knobs) -> nn.Module:
    return ActivationCheckpoint(**knobs).wrap_model(STAND_IN, net)


def batch() -> torch.Tensor:
    return torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(1))


def flops(net: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        net(batch()).sum().backward()
    return counter.get_total_flops()


def saved_bytes(net: nn.Module) -> int:
    """Of all that the forward pass keeps for the backward pass, but for the parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in net.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = batch()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = net(x)
    assert output.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize(("every", "recomputed"), [(1, 4), (2, 2), (3, 2), (4, 1), (9, 1)])
def test_the_forward_flops_of_recomputed_blocks_count_twice(every, recomputed):
    plain = flops(model())
    assert plain > 3 * DEPTH * BLOCK_FLOPS
    assert flops(wrapped(model(), every=every)) - plain == recomputed * BLOCK_FLOPS


@pytest.mark.parametrize(("every", "plain_blocks"), [(None, 4), (1, 0), (2, 2), (3, 2), (4, 3)])
def test_a_recomputed_block_keeps_its_input_only(every, plain_blocks):
    """In any case the first input and five hidden states (one per block, and the last layer's) are kept; a plain block
    keeps what tanh gives, too."""
    hidden = BATCH * WIDTH * 4
    net = model() if every is None else wrapped(model(), every=every)
    assert saved_bytes(net) == BATCH * 8 * 4 + 5 * hidden + plain_blocks * hidden


@pytest.mark.parametrize("every", [1, 2])
def test_bits_do_not_change_with_dropout(every):
    results = []
    for net in (model(0.3), wrapped(model(0.3), every=every)):
        torch.manual_seed(2)
        loss = net(batch()).square().sum()
        noise = torch.rand(3)  # the generator goes on from the same place
        loss.backward()
        results.append([loss.detach(), noise, *(p.grad for p in net.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch.manual_seed(3)
    assert not torch.equal(model(0.3)(batch()).square().sum(), results[0][0])


def test_names_do_not_change_and_a_copy_recomputes_with_its_own_weights():
    net = wrapped(model())
    assert net.state_dict().keys() == model().state_dict().keys()
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert not other(batch()).any()
    assert net(batch()).any()


class Two(nn.Module):
    """Blocks by class name, and two lists of which one is longer."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.long = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))


def test_which_blocks():
    net = Two()
    assert find_blocks(None, net, None, "k") == list(net.long)
    assert find_blocks(None, net, ["Linear"], "k") == [*net.short, *(block[0] for block in net.long)]
    assert find_blocks(None, net, ["Sequential", "Linear"], "k") == [
        m for m in net.modules() if type(m) in (nn.Linear, nn.Sequential)
    ]


@pytest.mark.parametrize(
    ("net", "knobs", "message"),
    [
        (model(), {"blocks": ["Blok"]}, r"blocks=\[Blok\]: no Blok in this model, which has Block, ModuleList, Net"),
        (model(), {"blocks": ["Block", "Other"]}, r"blocks=\[Block,Other\]: no Other in this model"),
        (
            nn.Sequential(nn.Linear(2, 2)),
            {},
            "blocks=null: no nn.ModuleList with members in this model, which has Sequential",
        ),
    ],
)
def test_what_is_not_there_is_refused(net, knobs, message):
    with pytest.raises(ConfigError, match=message):
        wrapped(net, **knobs)


class Shared(nn.Module):
    """One layer, three times, as in ALBERT (Lan et al. 2019, arXiv:1909.11942)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh())] * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_shared_block_is_wrapped_once():
    net = wrapped(Shared())
    assert flops(net) - flops(Shared()) == 3 * 2 * BATCH * 8 * 8
    net.layers[0].forward.on = False
    assert flops(net) == flops(Shared())


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"every": 0}, "every=0: must be at least 1"),
        ({"policy": "ful"}, "policy=ful: must be full or selective or offload; did you mean full?"),
        ({"budget": -0.1}, "budget=-0.1: must be at least 0"),
        ({"budget": float("nan")}, "budget=nan: must be at least 0"),
        (
            {"budget": 0.5, "every": 2},
            "budget=0.5: chooses the blocks whose recomputation costs least, so every=2 has no place; leave one out",
        ),
        (
            {"budget": 0.5, "policy": "selective"},
            "budget=0.5: chooses the blocks whose recomputation costs least, so policy=selective has no place; "
            "leave one out",
        ),
    ],
)
def test_a_knob_out_of_range_is_refused(knobs, message):
    with pytest.raises(ConfigError) as refusal:
        ActivationCheckpoint(**knobs)
    assert str(refusal.value) == f"callbacks.activation_checkpoint.{message}"


def test_a_budget_for_blocks_in_blocks_is_refused():
    with refuses("callbacks.activation_checkpoint.budget=0.5", "callbacks.activation_checkpoint.blocks"):
        wrapped(Two(), blocks=["Sequential", "Linear"], budget=0.5)


class Compile(Callback):
    role = Role.COMPILE


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({}, ""),
        ({"policy": "selective"}, ""),
        ({"policy": "offload"}, "Dynamo breaks the block's graph there; use policy=full or policy=selective"),
        ({"budget": 0.5}, ""),
    ],
)
def test_what_a_compiled_block_can_not_do_is_refused(knobs, message):
    callbacks = {"compile": Compile(), "activation_checkpoint": ActivationCheckpoint(**knobs)}
    if message:
        with pytest.raises(ConfigError) as refusal:
            arrange(callbacks, set())
        assert str(refusal.value).startswith("activation_checkpoint and compile can't run together: ")
        assert str(refusal.value).endswith(message)
    else:
        assert list(arrange(callbacks, set())) == ["activation_checkpoint", "compile"]


def test_offload_on_a_cpu_is_told(caplog):
    wrapped(model(), policy="offload")
    assert "policy=offload frees nothing on the CPU, whose memory is the host's" in caplog.text


@pytest.mark.parametrize("state", [{}, {"budget": 0.4, "blocks": 4, "recomputed": [0]}])
def test_a_state_of_another_budget_is_left(state):
    callback = ActivationCheckpoint(budget=0.5)
    callback.wrap_model(STAND_IN, model())
    callback.load_state_dict(state)
    assert all(forward.on for forward in callback.wrapped.values())
    callback.load_state_dict({"budget": 0.5, "blocks": 4, "recomputed": [0, 2]})
    assert [forward.on for forward in callback.wrapped.values()] == [True, False, True, False]
