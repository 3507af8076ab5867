"""What recomputing costs and saves, counted; the same bits; and which blocks."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from toy_recipe import Toy

from trainer.blocks import find_blocks
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.errors import ConfigError

BATCH, WIDTH, DEPTH = 6, 16, 4
BLOCK_FLOPS = 2 * BATCH * WIDTH * WIDTH  # of a block's forward pass: one matrix product


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Toy(width=WIDTH, depth=DEPTH, dropout=dropout).model()


def wrapped(net: nn.Module, **knobs) -> nn.Module:
    return ActivationCheckpoint(**knobs).wrap_model(SimpleNamespace(recipe=None), net)


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


def test_every_must_be_positive():
    with pytest.raises(ConfigError, match=r"activation_checkpoint\.every=0: must be at least 1"):
        ActivationCheckpoint(every=0)
