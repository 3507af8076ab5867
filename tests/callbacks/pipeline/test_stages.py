"""Stages against the whole model in one process: which models are cut without a bit of difference, which are not."""

import copy
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.messages import refuses
from torch import Tensor, nn
from toy_recipe import Net, Toy

from trainer.callbacks.pipeline.stages import StageGates, check_blocks, drop_others, padded
from trainer.errors import ConfigError
from trainer.parallel.layout import Layout, holders
from trainer.parallel.placeholder import Placeholder

WIDTH = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        new = self.linear(self.norm(hidden)).tanh()
        return hidden + (new if mask is None else new * mask)


class Tower(nn.Module):
    """As transformers are written: a head, blocks that keep their residual inside, a tail that sees the input."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        mask = (x[:, :1] > 0).float()
        for layer in self.layers:
            hidden = layer(hidden, mask=mask)
        return self.last(hidden) * x[:, :1]


class Named(Tower):
    """Calls its blocks by keyword."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden=hidden)
        return self.last(hidden)


class Headless(Tower):
    """Gives the batch's own tensor to the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.cat([x, x[:, :2]], 1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.last(hidden)


class NormOutside(Tower):
    """The residual goes around what the block sees, so a block's input is not all that the model goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            hidden = hidden + layer(norm(hidden))
        return self.last(hidden)


class Bare(Headless):
    """The same without a parameter outside of the blocks that could be NaN."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.cat([x, x[:, :2]], 1)
        for layer in self.layers:
            hidden = hidden + layer(hidden.tanh())
        return self.last(hidden)


class SharedBias(Tower):
    """A learned mask from the head goes to all blocks, as T5's relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden, self.bias * 2)
        return self.last(hidden)


class Skips(Tower):
    """Leaves out a block."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in list(self.layers)[1:]:
            hidden = layer(hidden)
        return self.last(hidden)


class Pairs(Tower):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer((hidden, x))
        return self.last(hidden)


def x_of(net: nn.Module) -> Tensor:
    return torch.randn(5, 8 if isinstance(net, Net) else 4, generator=torch.Generator().manual_seed(3))


def blocks_of(net: nn.Module) -> list[nn.Module]:
    return list(net.blocks if hasattr(net, "blocks") else net.layers)  # pyright: ignore


def in_stages(net: nn.Module, starts: tuple[int, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Runs the stages one after another, then their backward passes; returns the loss and all gradients."""
    x = x_of(net)
    layout = Layout(starts, len(blocks_of(net)), len(starts))
    received: Tensor | None = None
    ends: list[tuple[Tensor | None, Tensor, nn.Module]] = []
    for stage in range(layout.stages):
        own = copy.deepcopy(net)
        uses = holders(own, blocks_of(own), layout)
        drop_others(own, {name for name, stages in uses.items() if stage in stages}, torch.device("cpu"))
        loss, stream = StageGates(blocks_of(own), layout).run(stage, received, lambda own=own: own(x).square().mean())
        ends.append((received, loss if stream is None else stream, own))
        received = None if stream is None else padded(stream.detach(), (7, stream.shape[1])).requires_grad_()
    gradient = torch.ones(())
    found: dict[str, Tensor] = {}
    for received, end, own in reversed(ends):
        end.backward(gradient)
        if received is not None:
            assert received.grad is not None and received.grad.is_contiguous()
            gradient = received.grad[: len(x)]
        found |= {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    return ends[-1][1].detach(), found


@pytest.mark.parametrize("build", [Tower, Named, Headless, lambda: Toy(depth=4).model()])
@pytest.mark.parametrize("starts", [(0, 1), (0, 3), (0, 1, 2, 3)])
def test_stages_give_the_loss_and_gradients_of_the_whole(build: Callable[[], nn.Module], starts: tuple[int, ...]):
    torch.manual_seed(0)
    net = build()
    before = (x := x_of(net)).clone()
    loss = net(x).square().mean()
    loss.backward()
    expected = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    found, gradients = in_stages(net, starts)
    assert torch.equal(found, loss.detach())
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], grad) for name, grad in expected.items())
    assert torch.equal(x, before)


@pytest.mark.parametrize("build", [NormOutside, Bare, SharedBias])
def test_a_result_that_needs_another_stages_parameters_is_nan(build: type[nn.Module]):
    torch.manual_seed(0)
    assert math.isnan(in_stages(build(), (0, 2))[0])


@pytest.mark.parametrize(
    ("build", "starts", "message"),
    [
        (Skips, (0, 1), "does not run all blocks once and in order"),
        (Pairs, (0, 2), "a block's first argument is tuple"),
    ],
)
def test_a_model_that_is_no_row_of_blocks_is_refused(build: type[nn.Module], starts: tuple[int, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        in_stages(build(), starts)


def test_blocks_must_differ_and_suffice():
    layer = Layer()
    with refuses("callbacks.pipeline", "share", "recipe.blocks()"):
        check_blocks([layer, Layer(), layer], 2)
    with refuses("callbacks.pipeline.stages", "3 stages", "2 blocks"):
        check_blocks([Layer(), Layer()], 3)
    check_blocks([Layer(), Layer()], 2)


def test_a_dropped_parameter_has_its_form_and_no_memory():
    net = Tower()
    shapes = {name: (p.shape, p.dtype) for name, p in net.state_dict().items()}
    drop_others(net, {"last.weight"}, torch.device("cpu"))
    assert {name: (p.shape, p.dtype) for name, p in net.state_dict().items()} == shapes
    memory = {name: p.untyped_storage().nbytes() for name, p in net.named_parameters()}
    assert memory.pop("last.weight") == 4 * WIDTH and set(memory.values()) == {4}
    assert [name for name, p in net.named_parameters() if p.requires_grad] == ["last.weight"]
    net.load_state_dict({name: torch.ones(shape) for name, (shape, _) in shapes.items()})
    assert (net.last.weight == 1).all() and net.last.bias.isnan().all()
    assert isinstance(copy.deepcopy(net).embed.weight, Placeholder)


def test_rows_are_padded_and_never_cut():
    stream = torch.randn(4, 3).T
    assert padded(stream, (3, 4)).is_contiguous() and torch.equal(padded(stream, (3, 4)), stream)
    assert padded(stream, (5, 4))[3:].eq(0).all() and torch.equal(padded(stream, (5, 4))[:3], stream)
    for shape in ((2, 4), (3, 5)):
        with pytest.raises(ConfigError, match=r"is \(3, 4\) between two stages, and the first one was"):
            padded(stream, shape)


def test_a_block_must_return_a_tensor():
    net = Tower()
    net.layers[0].forward = lambda hidden, mask=None: (hidden,)
    gates = partial(StageGates(blocks_of(net), Layout((0, 2), 4, 2)).run, 0, None)
    with refuses("callbacks.pipeline", "tuple"):
        gates(lambda: net(x_of(net)))
