"""Times and bytes of blocks, in a model that is still whole."""

import time

import pytest
import torch
from torch import Tensor, nn
from toy_recipe import Net, Toy

from trainer.callbacks.pipeline.profile_blocks import Stretches, try_whole
from trainer.parallel.modes import evaluating

CPU = torch.device("cpu")


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.norm = seconds, nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.norm(x)


def net_of(*seconds: float) -> Net:
    net: Net = Toy(depth=len(seconds), dropout=0.5).model()  # pyright: ignore
    net.blocks = nn.ModuleList(Slow(each) for each in seconds)
    return net


def test_a_trial_times_each_block_and_leaves_no_trace():
    net = net_of(0.0, 0.02, 0.06)
    next(iter(net.blocks)).eval()  # pyright: ignore
    before = {name: value.clone() for name, value in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    x, noise = torch.ones(3, 8), torch.get_rng_state()
    trial = try_whole(net, list(net.blocks), lambda: net(x).square().mean(), CPU)  # pyright: ignore
    assert trial is not None
    assert 0.02 <= trial.blocks[1] < trial.blocks[2] and trial.blocks[0] < 0.02
    assert trial.total == pytest.approx(trial.head + trial.tail + sum(trial.blocks))
    assert [module.training for module in net.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), noise)
    with torch.no_grad(), evaluating(net):
        assert trial.loss == net(x).square().mean().item()


def test_a_model_that_fails_or_repeats_its_blocks_has_no_times():
    net = net_of(0.0, 0.0)
    blocks = list(net.blocks)  # pyright: ignore
    assert try_whole(net, blocks, lambda: net(torch.ones(3, 9)).mean(), CPU) is None
    assert try_whole(net, blocks, lambda: net(net(torch.ones(3, 8)).repeat(1, 2)).mean(), CPU) is None
    assert not blocks[0]._forward_pre_hooks and not blocks[1]._forward_hooks


class Plain(nn.Module):
    """Keeps its input and its output for the backward pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append((self.training, torch.is_grad_enabled()))
        return self.linear(x).tanh()


def test_the_bytes_that_a_backward_pass_keeps_are_counted_once():
    """Of float32: a block keeps its input, which no part before it keeps, and its output."""
    net: Net = Toy(depth=3).model()  # pyright: ignore
    net.blocks = nn.ModuleList(Plain(16) for _ in range(3))
    x = torch.ones(5, 8)
    for mode in (True, False):
        net.train(mode)
        trial = try_whole(net, list(net.blocks), lambda: net(x).sum(), CPU)
        assert trial is not None and net.training == mode
        assert net.blocks[0].modes[-5:] == [(False, False)] * 4 + [(True, True)]  # pyright: ignore
        assert trial.saved == [5 * 8 * 4, *[2 * 5 * 16 * 4] * 3, 5 * 16 * 4]
        assert trial.stream == 5 * 16 * 4
    net.requires_grad_(False)
    trial = try_whole(net, list(net.blocks), lambda: net(x).sum(), CPU)
    assert trial is not None and trial.saved == [0.0] * 5


def test_one_block_at_a_time_is_on_the_device():
    """The meta device stands for a GPU: a moved parameter has no memory on the host, and its values are lost."""
    net: Net = Toy(depth=3).model()  # pyright: ignore
    blocks, seen = list(net.blocks), []  # pyright: ignore

    def look(block: nn.Module, *_: object) -> None:
        seen.append([next(each.parameters()).is_meta for each in blocks])

    stretches = Stretches(net, blocks, torch.device("meta"))
    for block in blocks:
        block.register_forward_pre_hook(look)
    with pytest.raises(NotImplementedError):  # no tensor comes back from there
        stretches.run(lambda: net(torch.ones(2, 8, device="meta")).sum())
    assert seen[0] == [True, False, False]
