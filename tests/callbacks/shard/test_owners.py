"""Which rank owns which parameter, and how weights come back: every parameter once, balanced, in bounded rounds."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import Tensor, nn

from trainer.callbacks.shard import owners as module
from trainer.callbacks.shard.owners import Owners, assign, rounds
from trainer.comm.ranks import Ranks
from trainer.process.environment import Place


def test_rounds_have_each_parameter_once_and_bounded_bytes():
    owned = [[torch.empty(n) for n in (3, 9, 2, 1)], [torch.empty(5), torch.empty(2, dtype=torch.float64)], []]
    found = list(rounds(owned, 20))
    assert [[[p.numel() for p in params] for params in groups] for groups in found] == [
        [[3], [5], []],
        [[9], [], []],  # larger than a round
        [[2, 1], [], []],
        [[], [2], []],
    ]
    assert [{p.dtype for params in groups for p in params} for groups in found[2:]] == [
        {torch.float32},
        {torch.float64},
    ]


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 30), nn.Linear(30, 3).double(), nn.PReLU(1))
    model[0].to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return model


class Add(torch.optim.Optimizer):
    """Adds its number of steps to each parameter with a gradient, and knows no more."""

    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1
                p.data.add_(p.grad)


def gather(place: Place, most: int) -> tuple[list[Any], int, int]:
    """The weights after two steps, the entries of this rank's state, and the rounds."""
    ranks, calls = Ranks(place, "cpu", "gloo", 20.0), 0
    model = net(0)
    parameters = list(model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROUND_BYTES", most)
        owners = Owners(parameters, ranks.new_group())
        real = owners.reduce.gather

        def counted(own: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return real(own)

        patch.setattr(owners.reduce, "gather", counted)
        optimizer = Add(parameters, {})
        owners.attach(optimizer)
        for _ in range(2):
            for i, p in enumerate(parameters):
                p.grad = torch.full_like(p, i + 1.0)
            optimizer.step()
            assert {p for p in parameters if p.grad is not None} == owners.own
    ranks.leave()
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return [p.tolist() for p in parameters], len(optimizer.state), calls


@pytest.mark.parametrize(("most", "rounds"), [(1 << 20, 2), (4 * 240 * 3, 2), (12, 5)])
def test_all_ranks_get_all_weights_in_bounded_rounds(most, rounds):
    expected = [(p + (i + 1) + (i + 1)).tolist() for i, p in enumerate(net(0).parameters())]
    found = run_ranks(3, gather, most)
    assert all(weights == expected for weights, _, _ in found)
    assert sum(state for _, state, _ in found) == len(expected)
    assert [calls for _, _, calls in found] == [2 * rounds] * 3  # two steps


def test_more_ranks_than_parameters(tmp_path):
    def sizes(world: int) -> list[int]:
        return [assign([3, 2], world).count(rank) for rank in range(world)]

    assert sizes(4) == [1, 1, 0, 0]
    assert run_ranks(3, few) == [[2.0, 3.0]] * 3


def few(place: Place) -> list[float]:
    ranks = Ranks(place, "cpu", "gloo", 20.0)
    parameters = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))]
    optimizer = Add(parameters, {})
    Owners(parameters, ranks.new_group()).attach(optimizer)
    for i, p in enumerate(parameters):
        p.grad = torch.full_like(p, i + 1.0)
    optimizer.step()
    ranks.leave()
    assert not dist.is_initialized()
    return [p.item() for p in parameters]
