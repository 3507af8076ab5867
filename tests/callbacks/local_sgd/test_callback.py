"""Local SGD and DiLoCo against naive versions on one process, and what a run saves while ranks differ."""

import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from support.loaders import KeepBatches
from support.messages import refuses
from support.quick import quick
from support.ranks import run_ranks
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.ema import EMA
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.local_sgd.averaging import partition
from trainer.callbacks.local_sgd.callback import LocalSGD
from trainer.callbacks.overlap.callback import Overlap
from trainer.composition import arrange
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.errors import ConfigError
from trainer.optim.groups import parameter_groups
from trainer.process.environment import Place
from trainer.trainer import Trainer

WORLD, STEPS = 3, 11


class Normed(nn.Sequential):
    """With running statistics, which differ between ranks too."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
        )


class Of(Toy):
    def model(self) -> nn.Module:
        return Normed().double()


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=0.02)


class Slow(Callback):
    """A reduction takes longer than a step."""

    role = Role.REDUCE

    def wrap_reduce(self, trainer, reduce):
        def slow(flat, bucket):
            time.sleep(0.0 if trainer.rehearsing else 0.1)
            return reduce(flat, bucket)

        return slow


class Data(KeepBatches):
    """Each step's batch and the share of the loss that this rank's has."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, float]] = []

    def on_step_end(self, trainer) -> None:
        (batch,), (weight,) = self.batches, trainer.data.weights
        self.steps.append((batch, weight * trainer.world / trainer.weight))


def run(
    place: Place, knobs: dict[str, Any], name: str = "run", steps: int = STEPS, resume: str | None = None,
    codec: str = "", slow: bool = False,
) -> dict[str, Any]:  # fmt: skip
    data = Data()
    callbacks: dict[str, Callback] = {"local_sgd": LocalSGD(**knobs), "data": data}
    if codec:
        callbacks["grad_compress"] = GradCompress(codec, feedback=True)
    if slow:
        callbacks["slow"] = Slow()
    trainer = Trainer(
        Of(samples=40, dtype="float64"), callbacks, adam, batch=12,
        options=Options(
            max_steps=steps, run_dir=f"runs/{name}", resume=resume, ddp=DDPOptions(0.001),
            checkpoint=CheckpointOptions(every_steps=5, keep=9),
        ),
        data=DataOptions(workers=0), place=place,
    )  # fmt: skip
    start = deepcopy(trainer.module)
    trainer.fit()
    end = {name: value.numpy() for name, value in trainer.module.state_dict().items()}
    return {"start": start, "steps": data.steps, "end": end, "validation": trainer.validation, "world": trainer.world}


def naive(
    runs: list[dict[str, Any]], every: int, warmup: int = 0, lr: float = 1.0, momentum: float = 0.0,
    fragments: int = 1, delay: int = 0, mix: float = 0.0,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The ranks as models of one process that run in turn; `warmup` steps with averaged gradients. What a fragment's
    weights differ by from the common ones is taken `delay` steps later, and a rank keeps `mix` of its own."""
    models = [deepcopy(run["start"]) for run in runs]
    optimizers = [adam(parameter_groups(model)) for model in models]
    recipe, common, velocity = Toy(), None, None
    order = list(runs[0]["start"].parameters())
    parts = [[next(i for i, q in enumerate(order) if q is p) for p in part] for part in partition(order, fragments)]
    coming: dict[int, tuple[int, list[Tensor]]] = {}  # fragment -> when it is due, and its pseudo-gradients
    for step in range(STEPS):
        for model, optimizer, run in zip(models, optimizers, runs, strict=True):
            batch, share = run["steps"][step]
            optimizer.zero_grad()
            (recipe.loss(model, batch) * share).backward()
        if step < warmup:
            for together in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([p.grad for p in together]).mean(0)
                for p in together:
                    p.grad = mean
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            weights = [[p.clone() for p in model.parameters()] for model in models]
            if step + 1 <= warmup or common is None:
                common = weights[0] if step + 1 <= warmup else [p.clone() for p in runs[0]["start"].parameters()]
                velocity = [torch.zeros_like(p) for p in common]
            for k, part in enumerate(parts):
                offset = (k + 1) * every // len(parts) % every
                sends = step + 1 > warmup and (step + 1 - warmup) % every == offset
                for now in (False, True) if sends else (False,):
                    if now:
                        gradients = [common[i] - torch.stack([own[i] for own in weights]).mean(0) for i in part]
                        coming[k] = step + delay, gradients
                    if k not in coming or coming[k][0] != step:
                        continue
                    for i, gradient in zip(part, coming.pop(k)[1], strict=True):
                        velocity[i] = momentum * velocity[i] + gradient
                        common[i] = common[i] - lr * (gradient + momentum * velocity[i])
                        for model in models:
                            own = list(model.parameters())[i]
                            own.copy_(mix * own + (1 - mix) * common[i])
    return {
        name: torch.stack([model.get_parameter(name).detach() for model in models]).mean(0).numpy()
        for name, _ in models[0].named_parameters()
    }


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "average": ({"every": 4}, {"every": 4}),
    "post-local": ({"every": 3, "warmup_steps": 5}, {"every": 3, "warmup": 5}),
    "diloco": ({"every": 3, "outer": "nesterov"}, {"every": 3, "lr": 0.7, "momentum": 0.9}),
    "late": ({"every": 4, "delay": 2}, {"every": 4, "delay": 2, "mix": 0.5}),
    "mixed": ({"every": 3, "delay": 1, "mix": 0.3}, {"every": 3, "delay": 1, "mix": 0.3}),
    "fragments": ({"every": 4, "fragments": 3}, {"every": 4, "fragments": 3}),
    "streaming diloco": (
        {"every": 4, "outer": "nesterov", "fragments": 2, "delay": 3, "mix": 0.2, "warmup_steps": 1},
        {"every": 4, "lr": 0.7, "momentum": 0.9, "fragments": 2, "delay": 3, "mix": 0.2, "warmup": 1},
    ),
    "every step": ({"every": 1, "outer": "nesterov", "outer_lr": 0.5}, {"every": 1, "lr": 0.5, "momentum": 0.9}),
}


@pytest.mark.parametrize("case", quick(dict.fromkeys(("streaming diloco", "mixed", "post-local", *CASES)), 3))
def test_the_weights_are_those_of_a_naive_version(case, tmp_path):
    """What is left at the end, and saved, is the mean of the ranks' weights."""
    ours, reference = CASES[case]
    runs = run_ranks(WORLD, run, ours)
    expected = naive(runs, **reference)
    saved = load_file(next(Path("ckpt/run").glob("step-*11")) / "model.safetensors")
    for rank in runs:
        for name, weights in expected.items():
            np.testing.assert_allclose(rank["end"][name], weights, rtol=1e-9, atol=1e-12)
            assert saved[name].tobytes() == rank["end"][name].tobytes()
        assert rank["validation"] == runs[0]["validation"]
    moved = max(
        np.abs(weights - runs[0]["start"].get_parameter(name).detach().numpy()).max()
        for name, weights in expected.items()
    )
    assert moved > 0.01


RESUMED = [
    pytest.param({"every": 4}, "", marks=pytest.mark.slow),
    pytest.param({"every": 3, "warmup_steps": 4, "outer": "nesterov"}, "", marks=pytest.mark.slow),
    ({"every": 4, "outer": "nesterov", "fragments": 2, "delay": 2}, ""),
    pytest.param({"every": 4, "fragments": 3, "delay": 1, "mix": 0.3}, "bf16", marks=pytest.mark.slow),
    # Saved while the codec is between its two reductions.
    pytest.param({"every": 4, "delay": 2}, "powersgd", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("knobs", "codec"), RESUMED)
def test_a_resume_between_two_meetings_has_the_same_bits(knobs, codec, tmp_path):
    """Each rank goes on with its own weights and moments, and with means that were on their way."""
    straight = run_ranks(WORLD, run, knobs, "run", STEPS, None, codec, codec == "powersgd")
    resumed = run_ranks(WORLD, run, knobs, "resumed", STEPS, "ckpt/run/step-00000005", codec, codec == "powersgd")
    for a, b in zip(straight, resumed, strict=True):
        assert {k: v.tobytes() for k, v in a["end"].items()} == {k: v.tobytes() for k, v in b["end"].items()}
        assert a["validation"] == b["validation"]


@pytest.mark.parametrize("codec", [pytest.param("", marks=pytest.mark.slow), "topk"])
def test_a_second_resume_before_the_next_meeting_has_the_same_bits(codec, tmp_path):
    """What the first one restored, and nobody has asked for since, is saved again."""
    knobs = {"every": 4, "outer": "nesterov"}
    straight = run_ranks(WORLD, run, knobs, "run", STEPS, None, codec)
    run_ranks(WORLD, run, knobs, "once", 6, "ckpt/run/step-00000005", codec)
    twice = run_ranks(WORLD, run, knobs, "twice", STEPS, "ckpt/once/step-00000006", codec)
    for a, b in zip(straight, twice, strict=True):
        assert {k: v.tobytes() for k, v in a["end"].items()} == {k: v.tobytes() for k, v in b["end"].items()}


def test_at_another_number_of_ranks_all_go_on_from_the_mean(tmp_path):
    knobs = {"every": 4}
    run_ranks(WORLD, run, knobs)
    saved = load_file("ckpt/run/step-00000005/model.safetensors")
    for world in (2, 1):
        (first, *_) = run_ranks(world, run, knobs, f"on-{world}", 5, "ckpt/run/step-00000005")
        for name, weights in saved.items():
            np.testing.assert_allclose(first["end"][name], weights, rtol=1e-12)
    log = Path("runs/on-1/logs/rank0.log").read_text()
    assert "local_sgd does nothing on one rank" in log


class Average(Callback):
    """A user's own, as of stochastic weight averaging."""

    role = Role.AVERAGE


@pytest.mark.parametrize("other", [Overlap, EMA, Average])
def test_what_it_refuses(other):
    with pytest.raises(ConfigError, match=r"meets and other can't run together: .*leave .* out"):
        arrange({"meets": LocalSGD(), "other": other()}, set())


def test_a_loss_scale_of_each_rank_is_refused():
    with refuses("meets and fp16 can't run together", "trainer.precision=bf16"):
        arrange({"meets": LocalSGD()}, {"fp16"})


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"every": 0}, "every=0: must be at least 1"),
        ({"every": 4, "fragments": 5}, "fragments=5: must be less than 5"),
        ({"every": 4, "delay": 4}, "delay=4: must be less than 4"),
        ({"delay": 1, "mix": 1.0}, "mix=1.0: must be less than 1"),
        ({"mix": 0.3}, "mix=0.3: has no effect with delay=0; set callbacks.local_sgd.delay=1 or more"),
        ({"outer_lr": 0.3}, "outer_lr=0.3: has no effect with outer=average; set callbacks.local_sgd.outer=nesterov"),
        ({"outer": "nestrov"}, "outer=nestrov: must be average or nesterov; did you mean nesterov"),
        ({"outer": "nesterov", "outer_momentum": 1.0}, "outer_momentum=1.0: must be less than 1"),
    ],
)
def test_knobs(knobs, words):
    with pytest.raises(ConfigError, match=rf"^callbacks\.local_sgd\.{words}"):
        LocalSGD(**knobs)
