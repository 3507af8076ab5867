"""Optimizers of many kinds that train, are saved in the middle, and go on."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from support.states import loaded_from, same, save_state
from trainer.checkpoint.serialize import load_optimizer_state, optimizer_state


class Master(Optimizer):
    """Keeps float32 weights of any parameter, a list, a nested dict, and a number."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(weight=p.float(), count=0, last=[], rows={"sum": p.float().flatten()[:2].double()})
                state["count"] += 1
                state["rows"]["sum"] += p.grad.flatten()[:2].double() / 3
                state["weight"] -= group["lr"] / state["count"] * p.grad.float() * state["rows"]["sum"].sum().float()
                state["last"] = [*state["last"][-1:], p.grad.float()]
                for gradient in state["last"]:
                    state["weight"] -= 0.001 * gradient.mul_(0.9)
                p.copy_(state["weight"])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda params: AdamW(params, lr=0.01, foreach=False),
    "adamw-foreach": lambda params: AdamW(params, lr=0.01, foreach=True),
    "adamw-fused": lambda params: AdamW(params, lr=0.01, fused=True),
    "adamw-amsgrad": lambda params: AdamW(params, lr=0.01, amsgrad=True),
    "sgd": lambda params: SGD(params, lr=0.01),
    "sgd-momentum": lambda params: SGD(params, lr=0.01, momentum=0.9, nesterov=True),
    "sgd-fused": lambda params: SGD(params, lr=0.01, momentum=0.9, fused=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "master": Master,
}


class Net(nn.Module):
    """Channels-last and transposed weights, a frozen one, one that gets no gradient, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.conv.weight = nn.Parameter(self.conv.weight.detach().contiguous(memory_format=torch.channels_last))
        self.mid = nn.Linear(4, 4)
        self.mid.weight = nn.Parameter(torch.randn(4, 4).t())
        self.again = nn.Linear(4, 4)
        self.again.weight = self.mid.weight
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(4, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.again(self.mid(self.conv(x).mean((2, 3))).tanh()))


def built(name: str, device: torch.device | str, dtype: torch.dtype) -> tuple[Net, Optimizer]:
    net = Net().to(device, dtype)
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": trained[::-1][:2], "weight_decay": 0.1},
        {"params": trained[::-1][2:]},
    ]  # not the module's order
    return net, OPTIMIZERS[name](groups)


def train(net: Net, optimizer: Optimizer, steps: range) -> None:
    p = net.conv.weight
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2, 3, 8, 8, generator=generator).to(p.device, p.dtype)
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()


def layout(optimizer: Optimizer, net: Net) -> dict[str, Any]:
    return {
        name: {key: (t.dtype, t.device, t.stride()) for key, t in entry.items() if isinstance(t, Tensor)}
        for name, entry in optimizer_state(optimizer, net).items()
    }


def goes_on(folder: Path, name: str, dtype: torch.dtype, device: torch.device | str) -> None:
    """Three steps, a save, three more, against six steps: bit for bit."""
    straight, straight_optimizer = built(name, device, dtype)
    train(straight, straight_optimizer, range(6))

    net, optimizer = built(name, device, dtype)
    train(net, optimizer, range(3))
    save_state(folder, {"model": net.state_dict(), "optimizer": optimizer_state(optimizer, net)})
    middle = copy.deepcopy(optimizer_state(optimizer, net))
    resumed, resumed_optimizer = built(name, device, dtype)
    train(resumed, resumed_optimizer, range(50, 51))  # state of another history must go
    state = loaded_from(folder)
    resumed.load_state_dict(state["model"])
    load_optimizer_state(resumed_optimizer, resumed, state["optimizer"])
    assert same(middle, optimizer_state(resumed_optimizer, resumed))
    assert layout(resumed_optimizer, resumed) == layout(optimizer, net)
    train(resumed, resumed_optimizer, range(3, 6))

    assert same(dict(straight.state_dict()), dict(resumed.state_dict()))
    assert same(optimizer_state(straight_optimizer, straight), optimizer_state(resumed_optimizer, resumed))
    assert same(middle, state["optimizer"])  # what was loaded is a copy
