"""A stack of blocks of which every saved byte and every FLOP can be counted by hand, and the counting."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from scripts.bench.activations import kept_bytes
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint

CPU = torch.device("cpu")
ROWS, WIDTH, DROPOUT = 64, 16, 0.3
INNER = (32, 64, 48, 16)  # of each block
FLOAT = 4  # bytes


class Mlp(nn.Module):
    """x -> x + dropout(gelu(x W) V).

    Keeps x for the first product, x W for gelu, gelu's result for the second product, and dropout's factors.
    """

    def __init__(self, inner: int, dropout: float = DROPOUT) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(WIDTH, inner)), nn.Parameter(torch.randn(inner, WIDTH))
        self.inner, self.dropout = inner, dropout

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * F.dropout(F.gelu(x @ self.up) @ self.down, self.dropout)

    def plain(self) -> int:
        return FLOAT * ROWS * (2 * WIDTH + 2 * self.inner)

    def input(self) -> int:
        return FLOAT * ROWS * WIDTH

    def products(self) -> int:
        return FLOAT * ROWS * (self.inner + WIDTH)

    def flops(self) -> int:
        return 2 * 2 * ROWS * WIDTH * self.inner


class Stack(nn.Module):
    """A first layer that keeps the batch, the blocks, and a sum, which keeps nothing."""

    def __init__(self, inner: tuple[int, ...] = INNER, dropout: float = DROPOUT) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mlp(each, dropout) for each in inner)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.sum()


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def wrapped(net: nn.Module, **knobs: Any) -> nn.Module:
    """Applies the callback. No knob: the plain model."""
    if knobs:
        ActivationCheckpoint(**knobs).wrap_model(stand_in(net), net)
    return net


def stand_in(net: nn.Module) -> Any:
    """A trainer of one rank, as far as the callback needs it."""
    ranks = SimpleNamespace(gather=lambda value: [value])
    return SimpleNamespace(recipe=None, device=CPU, module=net, ranks=ranks, callbacks={})


def flops(net: nn.Module) -> int:
    """Of a forward and a backward pass."""
    with FlopCounterMode(display=False) as counter:
        net(batch()).sum().backward()
    return counter.get_total_flops()


def kept(net: nn.Module) -> int:
    """Bytes that exist between forward and backward, but for the batch, the loss and the parameters."""
    x = batch()
    return kept_bytes(net, lambda: net(x), CPU) - FLOAT


def results(net: nn.Module, loss: Callable[[Tensor], Tensor] = Tensor.sum) -> list[Tensor]:
    """Loss, the random numbers that follow the forward pass, and the gradients."""
    torch.manual_seed(2)
    value = loss(net(batch()))
    noise = torch.rand(3)
    value.backward()
    return [value.detach(), noise, *(p.grad for p in net.parameters() if p.grad is not None)]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
