"""The profile of a rank that is alone: work and bytes of a sample."""

import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.configs import toy_config
from support.ranks import run_ranks
from torch import nn

from trainer.process.environment import Place
from trainer.tools.tune.configs import alone, of_trial
from trainer.tools.tune.measure import (
    ROUNDS,
    Profile,
    a_sample,
    cuts,
    in_steps,
    in_turns,
    line,
    profile,
    saved_bytes,
    settled,
    shares,
)
from trainer.tools.tune.workload import make_workload


def measure(place: Place, config: dict[str, Any]) -> dict[str, Any]:
    return profile(config, place, 1, 4)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_ranks_measure_their_own_work(dropout: float, tmp_path: Path) -> None:
    config = toy_config()
    config["recipe"]["dropout"] = dropout
    answers = run_ranks(2, measure, of_trial(alone(config, 2), tmp_path / "a", 1, 60, 5))
    elements = [8 * 16, 16, 16 * 16, 16, 16 * 16, 16, 16 * 4, 4]
    for answer in answers:
        assert answer["parameters"] == elements and answer["random"] is bool(dropout) and not answer["batch_norm"]
        assert answer["state_bytes"] == 4 * 4 * sum(elements) + 4 * len(elements)  # two moments, and a step each
        assert min(answer[name] for name in ("forward_s", "backward_s", "optimizer_s", "data_s")) > 0
        assert answer["activation_bytes"] > 4 * 16
        assert sum(answer["compute"]) == pytest.approx(1) and len(answer["compute"]) == len(elements)
        assert (answer["blocks"], answer["boundary_bytes"]) == (2, 4 * 16)  # what a pipeline would cut and send
        assert sum(answer["parts"]) == pytest.approx(1) and len(answer["parts"]) == 4 and answer["tied_bytes"] == 0
        assert answer["part_of"] == [0, 0, 1, 1, 2, 2, 3, 3]
    work = make_workload(answers)
    assert work.parameters == tuple(elements) and work.shapes[0] == (16, 8)
    assert work.forward_s == max(answers, key=lambda answer: answer["step_s"])["forward_s"]


def test_each_rank_measures_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made(Exception):
        pass

    def make(**given: Any) -> None:
        raise Made(given["place"])

    monkeypatch.setattr("trainer.tools.tune.measure.build_components", lambda config: {"callbacks": {}})
    monkeypatch.setattr("trainer.tools.tune.measure.Trainer", make)
    with pytest.raises(Made) as made:
        profile({"trainer": {"run_dir": "r"}}, Place(3, 4, 1, 2, "store", "tune"), 1, 4)
    assert made.value.args == (Place(0, 1, 1, 1, "", "tune"),)


@pytest.mark.parametrize("micro", [1, 3])
def test_a_size_whose_pass_fails_is_left_out(micro: int) -> None:
    """One sample has no variance; today's own micro-batch has to work."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    trainer: Any = SimpleNamespace(
        plan=SimpleNamespace(micro=micro), loss=SimpleNamespace(compute=lambda model, batch: model(batch).sum()),
        strategy=SimpleNamespace(model=model), module=model, parameters=list(model.parameters()),
        device=torch.device("cpu"), recipe=None,
    )  # fmt: skip
    watch = Profile(1, 4)
    fails = pytest.raises(ValueError, match="more than 1 value per channel") if micro == 1 else nullcontext()
    with fails:
        watch.rehearse(trainer, lambda batch: model(batch).sum().backward(), torch.randn(micro, 2))
    if micro == 3:
        assert watch.forward_s > 0 and watch.activation_bytes > 0
        assert [line.partition(" more")[0] for line in watch.failed] == ["micro_batch=1: ValueError: Expected"]


def test_passes_take_what_they_take_in_a_step() -> None:
    phases = {"step": 2.0, "forward": 0.4, "backward": 0.8, "optimizer": 0.1}
    assert in_steps(phases, 1.5) == pytest.approx(0.9)  # a share of the median step: a slow one counts less
    assert in_steps({}, 1.5) == 0.0


def test_of_the_steps_the_later_half_counts() -> None:
    """Measured on four ranks of 30M: pages of new memory fault in the first five steps."""
    assert settled([3.0, 2.9, 2.6, 2.4, 2.4, 2.3]) == [2.4, 2.4, 2.3] and settled([3.0]) == [3.0]


def test_calls_take_turns_for_about_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], list[str]()
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def call(name: str, takes: float) -> None:
        calls.append(name)
        now[0] += takes

    quick = [lambda: call("a", 0.1), lambda: call("b", 0.2)]
    assert in_turns(quick, torch.device("cpu")) == pytest.approx([0.1, 0.2])
    assert calls == ["a", "b"] * (1 + ROUNDS)
    for takes, rounds in ((3.0, 4), (20.0, 2)):
        calls.clear()
        assert in_turns([lambda takes=takes: call("c", takes)], torch.device("cpu")) == pytest.approx([takes])
        assert calls == ["c"] * rounds


def test_shares_of_a_backward_pass() -> None:
    """The layer that takes nearly all of the time has nearly all of the pass."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)
            return grads[0]

    first, unused, last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)
    parameters = [layer.weight for layer in (first, unused, last)]
    found = shares(lambda: last(Slow.apply(first(torch.ones(2, 3)))).sum(), parameters, torch.device("cpu"))
    assert found[0] > 0.8 and found[1] == 0 and sum(found) == pytest.approx(1)
    assert all(parameter.grad is None for parameter in parameters)


def test_the_parts_that_a_pipeline_cuts_and_the_tied_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 4)
            self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
            self.end = nn.Linear(4, 5)
            self.end.weight = self.table.weight

        def forward(self) -> torch.Tensor:
            stream = self.table(torch.arange(2))
            for block in self.blocks:
                stream = block(stream)
            return self.end(stream).sum()

    model = Tied()
    trainer = SimpleNamespace(recipe=None, module=model, parameters=list(model.parameters()))
    compute = [0.1, *[0.1, 0.2, 0.15, 0.05, 0.1, 0.0], 0.3]  # of table, blocks with biases, and the last bias
    parts, part_of, *sent = cuts(trainer, model, compute)
    assert parts == pytest.approx([0.1, 0.3, 0.2, 0.1, 0.3]) and part_of == [0, 1, 1, 2, 2, 3, 3, 4]
    assert sent == [4 * 2 * 4, 4 * 5 * 4]
    model.blocks[1] = model.blocks[0]  # two stages would have it
    assert cuts(trainer, model, compute) == ((), (), 0.0, 0.0)


def test_a_line_through_sizes() -> None:
    assert line([1, 2, 4], [0.5, 0.7, 1.1]) == pytest.approx((0.2, 0.3))
    assert line([5, 10], [0.7, 1.2]) == pytest.approx((0.1, 0.2))
    assert line([5, 10], [1.2, 1.2]) == pytest.approx((0.06, 0.6))  # noise: at most half of a pass is fixed
    assert line([5, 10], [0.1, 1.2]) == pytest.approx((0.12, 0.0))
    assert line([8], [0.8]) == pytest.approx((0.1, 0.0))


def test_bytes_that_autograd_keeps_by_hand() -> None:
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    assert saved_bytes(lambda: layer(x).square().sum(), layer) == 4 * (5 * 4 + 5 * 3)
    assert a_sample({2: 100.0, 6: 140.0}) == 10 and a_sample({4: 100.0}) == 25  # 80 bytes are there once
