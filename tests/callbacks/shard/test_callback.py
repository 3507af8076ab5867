"""Sharded optimizer state and gradients: the bits of plain training, whatever else changes the step."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from support.quick import selected
from support.ranks import run_ranks
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.bucket.callback import Bucket
from trainer.callbacks.ema import EMA
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.local_sgd.callback import LocalSGD
from trainer.callbacks.nan_guard.callback import NanGuard
from trainer.callbacks.onebit_adam.callback import OneBitAdam
from trainer.callbacks.overlap.callback import Overlap
from trainer.callbacks.shard.callback import Shard
from trainer.composition import arrange
from trainer.config.options import DataOptions, DDPOptions, Options
from trainer.data.batch import Split
from trainer.errors import ConfigError
from trainer.optim.factories import adamw, lamb, sgd
from trainer.process.environment import Place
from trainer.trainer import Trainer

STEPS, BAD = 6, 3


class Mixed(nn.Module):
    """Layers that are laid out in many ways: a convolution in channels_last, statistics, a tied and a frozen weight, a
    scalar of another dtype, a ModuleList of blocks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
        self.first, self.tied, self.last = nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))
        self.blocks[1][0].weight = self.tied.weight  # pyright: ignore[reportIndexIssue]
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.1)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.conv(x.view(-1, 2, 2, 2)).flatten(1))
        for block in self.blocks:  # pyright: ignore[reportGeneralTypeIssues] a ModuleList
            x = x + self.drop(block(x)) * self.frozen
        return self.last(self.norm(self.tied(x))) * self.scale.float()


class Recipe(Toy):
    """In the step `BAD` rank 1 has an infinite gradient for one parameter only, which one rank owns."""

    trainer: Any = None
    bad = ""

    def model(self) -> nn.Module:
        return Mixed()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        now = self.trainer is not None and self.trainer.step == BAD - 1 and self.trainer.rank == 1 and model.training
        if self.bad and now:
            p = dict(self.trainer.module.named_parameters())[self.bad]
            loss = loss + _Infinite.apply(p)  # pyright: ignore[reportOperatorIssue]
        return loss


class _Infinite(torch.autograd.Function):
    """0 with an infinite gradient: the loss stays finite."""

    @staticmethod
    def forward(ctx: Any, p: Tensor) -> Tensor:
        ctx.save_for_backward(p)
        return p.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.full_like(ctx.saved_tensors[0], math.inf)


class Watch(Callback):
    """The norm and the loss of each step, and the gradients and the state that the rank holds."""

    role = Role.MEASURE

    def __init__(self) -> None:
        self.numbers: list[float] = []
        self.held: set[str] = set()

    def on_fit_start(self, trainer) -> None:
        trainer.recipe.trainer = trainer

    def on_before_optimizer_step(self, trainer) -> None:
        self.held |= {name for name, p in trainer.module.named_parameters() if p.grad is not None}

    def on_step_end(self, trainer) -> None:
        self.numbers += [trainer.metrics["train/loss"], trainer.metrics["train/grad_norm"]]


class Unequal(Callback):
    role = Role.BATCH

    def split(self, trainer, position: int) -> Split:
        rest = trainer.batch - 4 * (trainer.world - 1)
        return Split(trainer.batch, (*[4] * (trainer.world - 1), rest), accumulate=2)


@dataclass
class Case:
    optimizer: Callable[..., Any] = adamw
    callbacks: Callable[[], dict[str, Callback]] = dict
    options: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    bad: str = ""
    bucket_mib: float | None = 0.001
    stages: tuple[int, ...] = (1, 2)


FP16 = "fp16 adamw"
CASES = {
    "adamw": Case(),
    "sgd": Case(sgd, options={"clip_norm": 0.5}),
    "lamb": Case(lamb, lambda: {"ema": EMA(0.8)}, {"clip_norm": 0.5}, 2),  # which leaves ranks their buffers
    "adagrad": Case(lambda groups: torch.optim.Adagrad(groups, lr=0.01)),
    "unequal": Case(sgd, lambda: {"unequal": Unequal()}, {"clip_norm": 0.5}, 2),
    "one bucket": Case(options={"clip_norm": 0.5}, bucket_mib=None),
    FP16: Case(options={"precision": "fp16", "clip_norm": 0.5}, bad="last.bias"),
    "fp16 sgd": Case(sgd, options={"precision": "fp16"}, accumulate=2, bad="first.weight"),
    "bf16": Case(lamb, options={"precision": "bf16"}),
    "skip": Case(callbacks=lambda: {"nan_guard": NanGuard("skip")}, bad="last.bias"),
    "rollback": Case(lamb, lambda: {"nan_guard": NanGuard("rollback", every=2)}, {"clip_norm": 0.5}, bad="conv.bias"),
    "recompute": Case(callbacks=lambda: {"activation_checkpoint": ActivationCheckpoint()}, accumulate=2),
    "codec": Case(callbacks=lambda: {"grad_compress": GradCompress("topk", density=0.3)}, accumulate=2),
    "views": Case(sgd, options={"ddp": {"gradient_as_bucket_view": True}}, accumulate=2, stages=(1,)),
    "unused": Case(options={"ddp": {"find_unused_parameters": True}}, stages=(1,)),
    "static": Case(options={"ddp": {"static_graph": True}}, stages=(1,)),
}


SHORT = ("unequal", FP16)  # in each run of the tests


def train(place: Place, name: str, stage: int) -> dict[str, Any]:
    case, watch, run = CASES[name], Watch(), f"{name}-{stage}".replace(" ", "-")
    options = {**case.options}
    ddp = DDPOptions(case.bucket_mib, **options.pop("ddp", {}))
    recipe = Recipe()
    recipe.bad = case.bad
    trainer = Trainer(
        recipe, {"watch": watch, **case.callbacks(), **({"shard": Shard(stage)} if stage else {})},  # pyright: ignore
        case.optimizer, batch=24, accumulate=case.accumulate, data=DataOptions(workers=0),
        place=replace(place, store=f"{place.store}-{run}"),
        options=Options(
            max_steps=STEPS, log_every_steps=1, run_dir=f"runs/{run}", check_replicas_every=1, ddp=ddp, **options
        ),
    )  # fmt: skip
    trainer.fit()
    weights = {**trainer.module.state_dict(), **{f"eval {k}": v for k, v in trainer.eval_model.state_dict().items()}}
    states = {name: trainer.optimizer.state.get(p, {}) for name, p in trainer.module.named_parameters()}
    return {
        "bits": {name: value.numpy().tobytes() for name, value in weights.items()},
        "numbers": [number if math.isfinite(number) else None for number in watch.numbers],
        "scale": trainer.scaler.get_scale() if trainer.scaler.is_enabled() else None,
        "buckets": trainer.buckets,
        "held": watch.held,
        "stateful": {name for name, state in states.items() if state},
        "trained": {name for name, p in trainer.module.named_parameters() if p.requires_grad},
    }


def train_all(place: Place, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    return {name: [train(place, name, stage) for stage in (0, *CASES[name].stages)] for name in names}


def refute(ranks: list[dict[str, list[dict[str, Any]]]], name: str) -> None:
    """Fail unless each stage has plain's bits, and each rank what it owns."""
    plain = ranks[0][name][0]
    assert len(set(plain["numbers"])) > STEPS
    for at, stage in enumerate(CASES[name].stages, start=1):
        runs = [rank[name][at] for rank in ranks]
        for rank, run in zip(ranks, runs, strict=True):
            own = rank[name][0]["bits"]  # buffers are each rank's between two steps
            wrong = [key for key, value in own.items() if run["bits"][key] != value]
            assert not wrong, (stage, wrong)
            assert (run["numbers"], run["scale"]) == (plain["numbers"], plain["scale"]), stage
            assert run["buckets"] == plain["buckets"]
        assert sorted(name for run in runs for name in run["stateful"]) == sorted(plain["stateful"])
        if stage == 2:
            assert sorted(name for run in runs for name in run["held"]) == sorted(plain["trained"])


@pytest.fixture(scope="module")
def three(request, tmp_path_factory) -> list[dict[str, list[dict[str, Any]]]]:
    """What each rank has of each case that is selected; the ranks are started once."""
    chosen = selected(request, "name")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("shard"))
        return run_ranks(3, train_all, [name for name in CASES if name in chosen | {FP16}], timeout_s=300)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.slow) for n in CASES])
def test_on_three_ranks_each_stage_has_the_bits_of_plain_training(three, name):
    refute(three, name)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_on_other_numbers_of_ranks_too(tmp_path, world):
    names = ["lamb", FP16]
    ranks = run_ranks(world, train_all, names)
    for name in names:
        refute(ranks, name)


def test_a_step_that_fp16_skips_is_skipped_by_all_ranks(three):
    """The owner of the infinite gradient alone sees it; half the scale says that all have."""
    for rank in three:
        for run in rank[FP16]:
            assert run["numbers"][2 * BAD - 1] is None and run["scale"] == three[0][FP16][0]["scale"] < 2.0**16


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("other", "why"),
    [
        (Overlap, "overlap can't run together: a rank steps only its own parameters, after all gradients"),
        (LocalSGD, "local_sgd can't run together: a rank steps"),
        (OneBitAdam, "onebit_adam can't run together: a rank steps"),
        (Bucket, "both decide how parameters and gradients are laid out"),
    ],
)
def test_what_can_not_work_is_refused_by_name(other, why, stage):
    name = {"Overlap": "overlap", "LocalSGD": "local_sgd", "OneBitAdam": "onebit_adam"}.get(other.__name__, "bucket")
    with pytest.raises(ConfigError, match=why) as refusal:
        arrange({"shard": Shard(stage), name: other()}, set())
    assert "leave one out" in str(refusal.value)


@pytest.mark.parametrize("setting", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view"])
def test_settings_of_ddp_are_refused_by_stage_2_alone(setting):
    arrange({"shard": Shard()}, {setting})
    with pytest.raises(ConfigError, match=rf"shard and {setting} .*stage 2.*; set trainer\.ddp\.{setting}=.*stage=1"):
        arrange({"shard": Shard(2)}, {setting})


@pytest.mark.parametrize("stage", [0, 4, "2"])
def test_another_stage_is_refused(stage):
    with pytest.raises(ConfigError, match=rf"^callbacks\.shard\.stage={stage}: must be 1 or 2 or 3, not (int|str)$"):
        Shard(stage)


@pytest.mark.parametrize("knob", [{"blocks": ["Block"]}, {"reshard": False}, {"hybrid": True}, {"offload": True}])
def test_knobs_of_stage_3_are_refused_by_the_others(knob):
    (key,) = knob
    with pytest.raises(
        ConfigError, match=rf"^callbacks\.shard\.{key}: has no effect with callbacks\.shard\.stage=2; set"
    ):
        Shard(2, **knob)
    assert Shard(3, **knob).stage == 3
