"""The measured bytes are those that are kept, the choice takes the least time, and all ranks and a resume agree."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.activations import CPU, INNER, Mlp, Stack, batch, equal, kept, results, stand_in, wrapped
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint, budget
from trainer.callbacks.activation_checkpoint.budget import Sizes, choose
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.optim.factories import sgd
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")


def least_time(sizes: Sizes, share: float) -> float:
    """Of all choices that keep no more than the budget, by trying each."""
    blocks = range(len(sizes.freed))
    subsets = [list(each) for n in range(len(blocks) + 1) for each in itertools.combinations(blocks, n)]
    fitting = [each for each in subsets if sizes.kept(each) <= share * sizes.plain]
    return min(sum(sizes.seconds[i] for i in each) for each in fitting or [list(blocks)])


def test_the_choice_takes_the_least_time_of_all():
    draw = random.Random(0)
    for _ in range(150):
        blocks = draw.randint(1, 9)
        freed = [draw.choice([0, 100, draw.randint(1, 1000)]) for _ in range(blocks)]
        inputs = draw.randint(0, 500)
        sizes = Sizes(inputs + sum(freed), inputs, freed, [draw.choice([0.0, 1.0, draw.random()]) for _ in freed])
        for share in (0.0, 0.1, 0.35, 0.5, 0.8, 0.99, 1.0):
            chosen = choose(sizes, share)
            assert sum(sizes.seconds[i] for i in chosen) == pytest.approx(least_time(sizes, share))
            assert sizes.kept(chosen) <= max(share * sizes.plain, inputs)


def test_the_choice_of_many_blocks_is_quick_and_near_the_bound():
    """Of 200 blocks whose seconds follow their bytes, a share of the bytes saves as large a share of the seconds."""
    draw = random.Random(0)
    freed = [draw.randint(10**6, 10**7) for _ in range(200)]
    sizes = Sizes(sum(freed), 0, freed, [each * 1e-9 for each in freed])
    chosen = choose(sizes, 0.5)
    again = sum(sizes.seconds[i] for i in chosen) / sum(sizes.seconds)
    assert 0.5 <= again < 0.505 and sizes.kept(chosen) <= 0.5 * sizes.plain


@pytest.mark.parametrize("blocks", [24, 100])
def test_equal_blocks_fill_the_budget(blocks):
    sizes = Sizes(110 * blocks, 10 * blocks, [100] * blocks, [1.0 + i / 1000 for i in range(blocks)])
    chosen = choose(sizes, 0.5)
    fitting = (0.5 * 110 * blocks - 10 * blocks) // 100
    assert chosen == list(range(blocks - int(fitting)))  # the slowest are kept


def test_the_ends_of_the_range():
    sizes = Sizes(1100, 100, [400, 600], [1.0, 2.0])
    assert choose(sizes, 0.0) == [0, 1] and choose(sizes, 1.0) == []
    assert choose(Sizes(0, 0, [], []), 0.5) == []


def measured(net: nn.Module) -> Sizes:
    wrapped(net, budget=0.5)
    return budget.measure(net, {block: block.forward for block in net.blocks}, CPU, lambda: net(batch()).backward())


def test_the_measured_bytes_are_those_that_any_choice_keeps():
    """Each of the 16 choices, counted."""
    sizes = measured(Stack())
    for number in range(len(INNER) + 1):
        for chosen in itertools.combinations(range(len(INNER)), number):
            net = wrapped(Stack(), budget=0.5)
            for i, block in enumerate(net.blocks):
                block.forward.on = i in chosen
            assert kept(net) == sizes.kept(list(chosen)), chosen


class Odd(Mlp):
    """Saves its output, takes a mask that all blocks share, gives a tuple, and is called twice."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(F.gelu(x @ self.up) @ self.down * mask), None


class Gated(nn.Module):
    def __init__(self, held: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.held, self.first = held, nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Odd(inner) for inner in (32, 48))

    def forward(self, x: Tensor) -> Tensor:
        mask = x.sigmoid()
        x = self.first(x)
        for block in (*self.blocks, *self.blocks):
            output = block(x, mask)[0]
            x = output if self.held else x + output
        return x.square().sum() if self.held else x.sum()


@pytest.mark.parametrize("held", [False, True])
def test_outputs_and_shared_inputs_count_once(held):
    """`held`: the output of a block is kept by what comes after it, so recomputing frees less."""
    sizes = measured(Gated(held))
    for chosen in ([], [0], [1], [0, 1]):
        net = wrapped(Gated(held), budget=0.5)
        for i, block in enumerate(net.blocks):
            block.forward.on = i in chosen
        assert kept(net) == sizes.kept(chosen), chosen


def test_measuring_changes_no_random_number_and_no_forward():
    plain = results(Stack())
    net = wrapped(Stack(), budget=0.5)
    own = [block.forward for block in net.blocks]
    torch.manual_seed(2)
    losses: list[Tensor] = []

    def run() -> None:
        losses.append(net(batch()))
        losses[0].backward()

    budget.measure(net, {block: block.forward for block in net.blocks}, CPU, run)
    assert torch.equal(losses[0].detach(), plain[0]) and torch.equal(torch.rand(3), plain[1])
    assert equal([p.grad for p in net.parameters()], plain[2:])
    assert [block.forward for block in net.blocks] == own and not net._forward_hooks


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.75, 0.9, 1.0])
def test_no_more_than_the_budget_is_kept_and_bits_stay(share):
    net = Stack()
    callback, plain = ActivationCheckpoint(budget=share), Stack()
    callback.wrap_model(stand_in(net), net)
    callback.rehearse(stand_in(net), lambda _: net(batch()).backward(), None)
    on = [block.forward.on for block in net.blocks]
    assert all(on) if share == 0 else not any(on) if share == 1 else any(on) and not all(on)
    assert kept(net) <= share * kept(plain) or share == 0
    assert kept(net) == kept(wrapped(Stack(), policy="full")) or share > 0
    net.zero_grad()
    assert equal(results(net), results(plain))


@pytest.mark.parametrize(("share", "warned"), [(0.0, False), (0.1, True), (0.2, False)])
def test_a_budget_below_the_inputs_is_told(share, warned, caplog):
    """They are a seventh of the bytes of all blocks."""
    net = Stack()
    callback = ActivationCheckpoint(budget=share)
    callback.wrap_model(stand_in(net), net)
    with caplog.at_level("INFO", "echelon"):
        callback.rehearse(stand_in(net), lambda _: net(batch()).backward(), None)
    text = " ".join(record.getMessage() for record in caplog.records)
    assert ("the inputs of the blocks alone are 0.1429" in text) == warned
    assert "recomputes blocks [0, 1, 2, 3] of 4: keeps 0.01562 of 0.1094 MiB" in text or share == 0.2


WORLD, BLOCKS = 3, 6


class Clock(Callback):
    """Gives each block a time, another on each rank."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds

    def wrap_model(self, trainer, model: nn.Module) -> nn.Module:
        calls = itertools.count()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(budget, "timed", lambda *_: self.seconds[next(calls) // budget.TIMED])
        return model

    def on_fit_end(self, trainer) -> None:
        self.patch.undo()


def train(
    place: Place, share: float | None, times: list[list[float]], run: str = "run", steps: int = 2, resume: bool = False
) -> tuple[list[int], list[int], list[Any], float]:
    """The choice of this rank, what it would choose by its own clock, its weights, and its clock's total."""
    seconds = times[place.rank]
    callback = ActivationCheckpoint(budget=share)
    alone: list[Sizes] = []
    with pytest.MonkeyPatch.context() as patch:
        agree = budget.agree
        patch.setattr(budget, "agree", lambda sizes, gather: (alone.append(sizes), agree(sizes, gather))[1])
        trainer = Trainer(
            Toy(width=32, depth=BLOCKS, dropout=0.2),
            {"clock": Clock(seconds), **({"activation_checkpoint": callback} if share is not None else {})},
            sgd, batch=12, accumulate=2, data=DataOptions(workers=0), name=run,
            options=Options(
                max_steps=steps, resume="auto" if resume else None, checkpoint=CheckpointOptions(every_steps=2),
                run_dir=f"runs/{run}",
            ),
            place=replace(place, store=f"{place.store}-{run}-{steps}-{share}"),
        )  # fmt: skip
        trainer.fit()
    chosen = callback.recomputed if share is not None else []
    own = choose(alone[0], share) if share is not None else []
    return chosen, own, [p.detach().numpy() for p in trainer.module.parameters()], sum(seconds)


def log(run: str = "run") -> str:
    return Path(f"runs/{run}/logs/rank0.log").read_text()


TIMES = [[1.0 + (i == rank) + rank / 10 for i in range(BLOCKS)] for rank in range(WORLD)]


def test_all_ranks_choose_alike_though_their_clocks_differ():
    plain = run_ranks(WORLD, train, None, TIMES, "plain")
    ranks = run_ranks(WORLD, train, 0.7, TIMES)
    assert len({json.dumps(own) for _, own, _, _ in ranks}) > 1
    assert [chosen for chosen, *_ in ranks] == [ranks[2][1]] * WORLD  # as the slowest rank would alone
    assert 0 < len(ranks[0][0]) < BLOCKS
    for (_, _, weights, _), (_, _, expected, _) in zip(ranks, plain, strict=True):
        assert all((a == b).all() for a, b in zip(weights, expected, strict=True))
    assert f"budget=0.7 recomputes blocks {ranks[0][0]} of 6" in log()


def test_a_resume_keeps_the_choice_unless_the_budget_is_another():
    others = [list(reversed(each)) for each in TIMES]
    whole = run_ranks(WORLD, train, 0.7, TIMES, "whole", 4)
    run_ranks(WORLD, train, 0.7, TIMES, "part", 2)
    rest = run_ranks(WORLD, train, 0.7, others, "part", 4, True)
    for (chosen, own, weights, _), (first, _, expected, _) in zip(rest, whole, strict=True):
        assert chosen == first != own
        assert all((a == b).all() for a, b in zip(weights, expected, strict=True))
    assert f"recomputes blocks {whole[0][0]}, as in the checkpoint" in log("part")
    other = run_ranks(WORLD, train, 0.8, others, "part", 6, True)
    assert [chosen for chosen, *_ in other] == [other[2][1]] * WORLD != [whole[0][0]] * WORLD
