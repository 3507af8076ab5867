"""Every optimizer trains on one rank and on three, by the bucket too, and goes on from a checkpoint bit for bit."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.optimizer_in_backward import OptimizerInBackward
from trainer.callbacks.overlap.callback import Overlap
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.optim.factories import adafactor, adagrad, adamw8bit, lamb, lars
from trainer.optim.muon import Muon
from trainer.optim.schedule import Linear
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.slow  # the contract's rows are in the default run

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adafactor": partial(adafactor, lr=0.1),
    "adagrad": partial(adagrad, lr=0.05),
    "adamw8bit": partial(adamw8bit, lr=0.01, min_8bit_size=256),
    "lamb": partial(lamb, lr=0.05),
    "lars": partial(lars, lr=0.01, trust_coefficient=1.0),
    "muon": partial(Muon, lr=0.03),
}
STEPPED_IN_PARTS: dict[str, Callable[[], dict[str, Callback]]] = {
    "overlap": lambda: {"overlap": Overlap()},
    "optimizer_in_backward": lambda: {"optimizer_in_backward": OptimizerInBackward()},
}
WITH = {"": dict[str, Callback], **STEPPED_IN_PARTS}
STEPS, MIDDLE = 6, 3


class Words(nn.Module):
    """An embedding and its tied output, matrices, norms; a scalar; weights in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 24)
        self.hidden = nn.Sequential(nn.Linear(24, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 24))
        self.convolution = nn.Conv2d(6, 6, 2)
        self.output = nn.Linear(24, 10)
        self.output.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding((x.abs() * 10).long() % 10).mean(1)
        h = h + self.convolution(h.view(-1, 6, 2, 2)).repeat(1, 1, 2, 2).flatten(1)
        return self.output(self.hidden(h) * self.scale)[:, :4]


class Of(Toy):
    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.memory_format = memory_format

    def model(self) -> nn.Module:
        return Words().to(memory_format=self.memory_format)


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, trainer) -> None:
        self.losses.append(trainer.metrics["train/loss"])


def train(place: Place, name: str, how: str, run: str, resume: str | None = None) -> tuple[list[float], bytes, Any]:
    losses, memory_format = Losses(), torch.contiguous_format if name == "adamw8bit" else torch.channels_last
    trainer = Trainer(
        Of(memory_format), {**WITH[how](), "losses": losses}, OPTIMIZERS[name], Linear(warmup=2), batch=12,
        options=Options(
            max_steps=STEPS, log_every_steps=1, run_dir=f"runs/{run}", resume=resume, ddp=DDPOptions(0.004),
            checkpoint=CheckpointOptions(every_steps=MIDDLE),
        ),
        data=DataOptions(workers=0), place=replace(place, store=f"{place.store}-{run}"),
    )  # fmt: skip
    trainer.fit()
    weights = b"".join(p.detach().numpy().tobytes() for p in trainer.module.parameters())
    return losses.losses, weights, sorted({key for s in trainer.optimizer.state.values() for key in s})


def train_all(place: Place) -> dict[tuple[str, str], list[Any]]:
    found = {}
    for name in OPTIMIZERS:
        for how in WITH:
            run = f"{place.world}-{name}-{how}"
            found[name, how] = [train(place, name, how, run)]
            if not how:
                found[name, how].append(train(place, name, how, f"{run}-on", f"ckpt/{run}/step-{MIDDLE:08d}"))
    return found


@pytest.fixture(scope="module", params=[1, 3])
def runs(request, tmp_path_factory) -> tuple[list[dict[tuple[str, str], list[Any]]], Path]:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return run_ranks(request.param, train_all, timeout_s=300), folder


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_and_resumes_bit_for_bit(runs, name):
    by_rank, folder = runs
    world = len(by_rank)
    for rank in by_rank:
        (losses, weights, _), (after, again, _) = rank[name, ""]
        assert losses[-1] < 0.9 * losses[0]
        assert (after, again) == (losses[MIDDLE:], weights)
        assert weights == by_rank[0][name, ""][0][1]
    run = folder / "ckpt" / f"{world}-{name}-"
    files = [Path(f"{run}{end}") / f"step-{STEPS:08d}" / "optimizer.safetensors" for end in ("", "-on")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "how"), [*itertools.product(OPTIMIZERS, STEPPED_IN_PARTS)])
def test_a_bucket_or_a_parameter_stepped_alone_has_the_same_bits(runs, name, how):
    for rank in runs[0]:
        assert rank[name, how][0] == rank[name, ""][0]


def test_states_are_those_of_the_papers(runs):
    (rank, *_), _ = runs
    assert {name: rank[name, ""][0][2] for name in OPTIMIZERS} == {
        "adafactor": ["col_var", "row_var", "step", "variance"],
        "adagrad": ["step", "sum"],
        "adamw8bit": ["absmax1", "absmax2", "qmap1", "qmap2", "state1", "state2", "step"],
        "lamb": ["exp_avg", "exp_avg_sq", "step"],
        "lars": ["momentum_buffer"],
        "muon": ["exp_avg", "exp_avg_sq", "momentum_buffer", "step"],
    }
