"""The passes of each stage, in order; the copies of its weights; messages that are waited for."""

import gc
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn

from trainer.callbacks.pipeline.pipedream import Awaited, PipeDream, open_links
from trainer.callbacks.pipeline.stages import drop_others
from trainer.callbacks.pipeline.strategy import pipeline_mesh
from trainer.checks.recipe import CheckedLoss
from trainer.comm.ranks import Ranks
from trainer.data.batch import Micro, Split, Step, count_samples
from trainer.parallel.layout import Layout, holders
from trainer.process.environment import Place

WIDTH, STEPS = 11, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def build(place: Place, micros: int, run_ahead: int) -> tuple[PipeDream, Ranks]:
    torch.manual_seed(0)
    model = Net()
    ranks, layout = Ranks(place, "cpu", "gloo", 20.0), Layout((0, 1, 2), 3, 3)
    uses, mesh = holders(model, list(model.layers), layout), pipeline_mesh(ranks, 3)
    drop_others(model, {name for name, found in uses.items() if mesh.place["stage"] in found}, torch.device("cpu"))
    pipeline = PipeDream(
        model, list(model.layers), layout, uses, mesh, split=Split(2 * micros, 1, micros), schedule="pipedream_2bw",
        reduce=None, expected=None, seed=0, step=lambda: 0, device=torch.device("cpu"),
        links=open_links(ranks, mesh.lines("stage")), run_ahead=run_ahead, rehearsing=lambda: False,
    )  # fmt: skip
    pipeline.loss = CheckedLoss(loss, count_samples)
    return pipeline, ranks


def copies() -> int:
    """Count the memories of weights and gradients."""
    gc.collect()
    shaped = [t for t in gc.get_objects() if isinstance(t, Tensor) and t.shape == (WIDTH, WIDTH)]
    return len(
        {
            t.data_ptr()
            for t in shaped + [t.grad for t in shaped if t.is_leaf and t.grad is not None]
            if t.is_contiguous() and t.stride() != (0, 0)
        }
    )


def passes(place: Place, micros: int, run_ahead: int) -> tuple[list[str], list[int], list[bool]]:
    pipeline, ranks = build(place, micros, run_ahead)
    seen: list[str] = []
    counts: list[int] = []
    forward, backward = pipeline._run_forward, pipeline._run_backward

    def run_forward(micro: int, version: Any) -> None:
        seen.append("F")
        forward(micro, version)

    def run_backward() -> None:
        seen.append("B")
        backward()

    pipeline._run_forward, pipeline._run_backward = run_forward, run_backward
    optimizer = torch.optim.SGD(pipeline.parameters, lr=0.1)
    given: list[bool] = []
    for _ in range(STEPS):
        batch = torch.randn(2, WIDTH)
        losses = pipeline.forward_backward(Step([Micro(batch, 2, [], [])] * micros), lambda: 2 * micros)
        given.append(pipeline.parameters[0].grad is not None)
        pipeline.clip(1.0)
        counts.append(copies())
        optimizer.step()
        optimizer.zero_grad()
        seen.append("|")
        assert all(len(box.sent) <= micros for box in pipeline.sends)
        del losses
    pipeline.drain()
    ranks.leave()
    return seen, counts, given


def test_passes_go_on_over_the_end_of_a_step():
    """Stage s is 2 - s micro-batches behind. It has two copies of its weights, and two of its gradients."""
    first, middle, last = run_ranks(3, passes, 3, 1)
    assert "".join(first[0]) == "FFFB|" + "FBFBFB|" * (STEPS - 1) + "BB"
    assert "".join(middle[0]) == "FFBFB|" + "FBFBFB|" * (STEPS - 1) + "B"
    assert "".join(last[0]) == "FBFBFB|" * STEPS
    assert first[1] == middle[1] == [3] + [4] * (STEPS - 1)
    assert last[1] == [2] + [3] * (STEPS - 1)
    assert first[2] == middle[2] == last[2] == [False] + [True] * (STEPS - 1)


def test_a_stage_may_be_further_ahead_of_the_next_one():
    """Then stage 0 runs a whole batch before its first backward pass. The last stage is never behind."""
    first, middle, last = run_ranks(3, passes, 4, 2)
    assert "".join(first[0]) == "FFFF|" + "FBFBFBFB|" * (STEPS - 1) + "BBBB"
    assert "".join(middle[0]) == "FFFBFB|" + "FBFBFBFB|" * (STEPS - 1) + "BB"
    assert "".join(last[0]) == "FBFBFBFB|" * STEPS


class Work:
    """A message that fills a tensor when it is waited for."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def wait(self) -> None:
        self.values.copy_(torch.arange(3.0))


@pytest.mark.parametrize("look", [list, lambda losses: losses[:], lambda losses: [losses[i] for i in range(3)]])
def test_a_look_at_losses_waits_for_them(look):
    values = torch.full((3,), float("nan"))
    losses = Awaited(values, Work(values))
    assert values.isnan().all() and len(losses) == 3
    assert [loss.item() for loss in look(losses)] == [0.0, 1.0, 2.0]
