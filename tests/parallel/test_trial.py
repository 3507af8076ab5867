"""Times of blocks, and the cut that follows from them."""

import time

import pytest
import torch
from torch import Tensor, nn
from toy_recipe import Net, Toy

from trainer.parallel.trial import Trial, cut_by_time, evaluating, try_whole

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


@pytest.mark.parametrize(
    ("seconds", "starts"),
    [
        ((1.0, 1.0), (0, 3)),
        ((1.0, 1.05), (0, 3)),  # alike: noise moves no block
        ((1.0, 2.0), (0, 4)),  # half as fast: half as many
        ((3.0, 1.0), (0, 1)),
    ],
)
def test_a_slow_rank_gets_fewer_blocks(seconds: tuple[float, ...], starts: tuple[int, ...]):
    trials = [Trial(0.0, [each] * 6, 0.0, 0.0) for each in seconds]
    assert cut_by_time(trials, [[0], [1]]) == starts
    assert cut_by_time([*trials, *trials], [[0, 2], [1, 3]]) == starts


def test_the_ends_and_the_slowest_replica_count():
    assert cut_by_time([Trial(3.0, [1.0] * 6, 0.0, 0.0)] * 2, [[0], [1]]) == (0, 1)
    assert cut_by_time([Trial(0.0, [1.0] * 6, 3.0, 0.0)] * 2, [[0], [1]]) == (0, 4)
    fast, slow = Trial(0.0, [1.0] * 6, 0.0, 0.0), Trial(0.0, [2.0] * 6, 0.0, 0.0)
    assert cut_by_time([fast, fast, fast, slow], [[0, 1], [2, 3]]) == (0, 4)
