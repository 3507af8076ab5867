"""Rows give plain DDP's numbers to rounding, hold a share of the bytes, and send nothing between micro-batches."""

import math
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.runs import sgd
from support.sharded import Case, adam, fit, flat
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.ema import EMA
from trainer.callbacks.nan_guard.callback import NanGuard
from trainer.callbacks.shard.callback import Shard
from trainer.callbacks.shard.fsdp import FSDP, own_parameters, units
from trainer.comm.mesh import line_of
from trainer.comm.ranks import Ranks
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")

CPU = torch.device("cpu")
CLOSE = 1e-6  # float32, a few steps of SGD


class Centre(nn.Module):
    """Subtracts a running mean, so that a pass reads what the rank itself has counted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean.lerp(x.detach().mean(0), 0.5)
        return x - self.mean


class Normed(Toy):
    """With running statistics, a count, a tied weight, dropout, and a parameter that is frozen."""

    def model(self) -> nn.Module:
        net = super().model()
        net.add_module(
            "first", nn.Sequential(net.get_submodule("first"), nn.BatchNorm1d(self.width), Centre(self.width))
        )
        net.blocks[1][0].bias.requires_grad_(False)
        net.tied = nn.Linear(8, self.width, bias=False)  # pyright: ignore[reportAttributeAccessIssue]
        net.tied.weight = net.first[0].weight
        net.register_buffer("ids", torch.arange(5))
        return net


class Holes(Toy):
    """A third of the batches have no items, and a loss of NaN."""

    def weight(self, batch: dict[str, Tensor]) -> int:
        return 0 if self._empty(batch) else super().weight(batch)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        return loss * math.nan if self._empty(batch) else loss

    def _empty(self, batch: dict[str, Tensor]) -> bool:
        return int(batch["x"][0, 0] * 1000) % 3 == 0


class Skipping(Holes):
    """Does not call the model for such batches."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(math.nan) if self._empty(batch) and model.training else super().loss(model, batch)


class OtherStart(Toy):
    """Starts from other weights on each rank."""

    def model(self) -> nn.Module:
        torch.manual_seed(dist.get_rank())
        return super().model()


def close(found: dict[str, Any], expected: dict[str, Any], bound: float = CLOSE) -> None:
    assert "refused" not in found, found
    for key in ("weights", "validated", "losses", "norms"):
        np.testing.assert_allclose(found[key], expected[key], rtol=0, atol=bound, err_msg=key)
    assert abs(found["validation"]["val/loss"] - expected["validation"]["val/loss"]) < bound


RECIPES = {
    "buffers": Normed(width=17, depth=3, dropout=0.1),
    "holes": Holes(width=17, depth=2),
    "one_parameter_has_few_rows": Toy(width=2, depth=2),
    "other_start": OtherStart(width=16),
}


def cases(shard: Shard | None) -> list[Case]:
    callbacks: dict[str, Callback] = {"shard": shard} if shard else {}
    with_all = {**callbacks, "activation_checkpoint": ActivationCheckpoint(), "ema": EMA(0.5)}
    guard = {**callbacks, "nan_guard": NanGuard("rollback", every=9)}
    found = [
        *(Case(callbacks, recipe=recipe, batch=36, accumulate=3, run=name) for name, recipe in RECIPES.items()),
        Case(with_all, recipe=RECIPES["buffers"], run="all"),
        Case({**guard, "once": Poison()}, {"validate_every": None}, run="guard"),
        Case(callbacks, {"precision": "bf16", "clip_norm": None}, run="bf16"),
    ]
    return [replace(case, run=f"{case.run}-sharded") for case in found] if shard else found


class Poison(Callback):
    """Makes the loss of one rank NaN in the fifth step."""

    def wrap_forward_backward(self, trainer, run):
        def poisoned(data, total):
            losses = run(data, total)
            if trainer.step == 4 and trainer.rank == 1 and not trainer.rehearsing:
                losses[0] = losses[0] * math.nan
            return losses

        return poisoned


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("world", "shard"),
    [
        pytest.param(3, Shard(3), id="rows"),
        pytest.param(3, Shard(3, reshard=False, offload=True), id="whole"),
        pytest.param(4, Shard(3, hybrid=2), id="hybrid"),
    ],
)
def test_numbers_are_those_of_ddp_to_rounding(world, shard):
    """With clipping, accumulation, uneven and empty weights, and parts of the validation that are not equal."""
    plain = run_ranks(world, fit, cases(None))
    for found, expected in zip(run_ranks(world, fit, cases(shard)), plain, strict=True):
        for case, one, other in zip(cases(None), found, expected, strict=True):
            close(one, other, 2e-3 if case.run == "bf16" else CLOSE)
        assert found[-1]["left"] == 0


class Reads(nn.Module):
    """Scales by a float and by an integer that it has counted from the samples; notes what each pass begins with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: list[tuple[list[float], int]] = []

    def forward(self, x: Tensor) -> Tensor:
        mean, count = self.mean.clone(), self.count.clone()
        if self.training:
            self.seen.append((mean.tolist(), int(count)))
            self.mean.lerp_(x.detach().mean(0), 0.5)
            self.count += (x[:, 0] > x[:, 1]).sum()
        return x * (1 + mean.tanh()) / (1 + count % 5)


class Reading(Toy):
    def model(self) -> nn.Module:
        net = super().model()
        net.add_module("first", nn.Sequential(net.get_submodule("first"), Reads(self.width)))
        return net


class Weights(Callback):
    """The weights after the last step; forgets what the rehearsal has seen."""

    def on_fit_start(self, trainer) -> None:
        self.reads = trainer.module.first[1]
        self.reads.seen.clear()

    def on_fit_end(self, trainer) -> None:
        self.weights = flat(trainer.module, buffers=False)


def read(place: Place) -> list[tuple[list[tuple[list[float], int]], Any]]:
    """What each micro-batch reads, and the weights: with DDP, and with each way of stage 3."""
    found = []
    for i, knobs in enumerate([None, {}, {"reshard": False}]):
        weights = Weights()
        Trainer(
            Reading(width=6), {"weights": weights, **({} if knobs is None else {"shard": Shard(3, **knobs)})}, sgd,
            batch=36, accumulate=3, data=DataOptions(workers=0),
            options=Options(
                max_steps=4, timeout_s=30.0, run_dir=f"runs/{i}", checkpoint=CheckpointOptions(every_steps=None)
            ),
            place=replace(place, store=f"{place.store}-{i}"),
        ).fit()  # fmt: skip
        found.append((weights.reads.seen, weights.weights))
    return found


@pytest.mark.slow
def test_training_passes_begin_with_rank_0s_buffers():
    """Once a step, as in DDP: the later micro-batches of a step read what the rank itself has counted."""
    ranks = run_ranks(3, read)
    for found in ranks:
        (plain, weights), *others = found
        assert len(plain) == 4 * 3
        for seen, own in others:
            assert [count for _, count in seen] == [count for _, count in plain]
            np.testing.assert_allclose([m for m, _ in seen], [m for m, _ in plain], rtol=0, atol=CLOSE)
            np.testing.assert_allclose(own, weights, rtol=0, atol=CLOSE)
    passes = zip(*(found[1][0] for found in ranks), strict=True)
    assert [len({str(each) for each in seen}) for seen in passes] == [1, 3, 3] * 4  # of 3 ranks


class Bytes(Callback):
    """Counts what a rank holds of parameters, gradients and optimizer state."""

    def on_before_optimizer_step(self, trainer) -> None:
        self.parameters = [nbytes(p) for p in trainer.parameters]
        self.gradients = [nbytes(p.grad) for p in trainer.parameters]

    def on_step_end(self, trainer) -> None:
        self.whole = [p.numel() * p.element_size() for p in trainer.parameters]
        self.state = sum(nbytes(v) for s in trainer.optimizer.state.values() for v in s.values() if v.dim())


def nbytes(tensor: Any) -> int:
    return tensor.to_local().nbytes if hasattr(tensor, "to_local") else tensor.nbytes


class Count(Callback):
    """Counts the collectives of each step after the first."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.steps: list[dict[str, int]] = []

    def wrap_model(self, trainer, model: nn.Module) -> nn.Module:
        for name in ("all_gather_single", "reduce_scatter_single"):
            self._note(name, getattr(dist, name))
        return model

    def _note(self, name: str, real: Any) -> None:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return real(*args, **kwargs)

        setattr(dist, name, noted)

    def wrap_batches(self, trainer, steps):
        for step in steps:
            self.calls.clear()
            yield step

    def on_step_end(self, trainer) -> None:
        self.steps.append({name: self.calls.count(name) for name in set(self.calls)})


class Overflow(Callback):
    """Makes one element of one rank's rows infinite in the third step, before the scaler looks."""

    def wrap_forward_backward(self, trainer, run):
        self.scales: list[float] = []

        def overflowing(data, total):
            losses = run(data, total)
            if trainer.step == 2 and trainer.rank == 1 and not trainer.rehearsing:
                trainer.parameters[0].grad.to_local()[0, 0] = math.inf
            return losses

        return overflowing

    def on_step_end(self, trainer) -> None:
        self.scales.append(trainer.scaler.get_scale())
        if trainer.step == 2:
            self.before = [p.detach().to_local().clone() for p in trainer.parameters]
        if trainer.step == 3:
            self.same = all(torch.equal(a, p.to_local()) for a, p in zip(self.before, trainer.parameters, strict=True))


def counted(place: Place, shard: Shard, watch: Callback, options: dict[str, Any]) -> dict[str, Any]:
    real = dist.all_gather_single, dist.reduce_scatter_single
    shard = deepcopy(shard)  # which keeps its process groups
    trainer = Trainer(
        Toy(width=17, depth=3), {"shard": shard, "watch": watch}, adam, batch=36, accumulate=3,
        data=DataOptions(workers=0),
        options=Options(max_steps=3, timeout_s=30.0, checkpoint=CheckpointOptions(every_steps=None), **options),
        place=place,
    )  # fmt: skip
    try:
        trainer.fit()
    finally:
        dist.all_gather_single, dist.reduce_scatter_single = real
    return {name: value for name, value in vars(watch).items() if name not in ("calls", "before")}


def test_a_rank_holds_its_rows_of_parameters_gradients_and_state():
    ranks = run_ranks(3, counted, Shard(3), Bytes(), {})
    whole = ranks[0]["whole"]
    for name in ("parameters", "gradients"):
        assert [sum(each) for each in zip(*(rank[name] for rank in ranks), strict=True)] == whole
        for rank in ranks:
            assert sum(rank[name]) <= 0.4 * sum(whole)  # 17 rows are 6, 6 and 5; 4 are 2, 2 and 0
    assert sum(rank["state"] for rank in ranks) == 2 * sum(whole)  # AdamW's two moments
    assert max(rank["state"] for rank in ranks) <= 0.4 * 2 * sum(whole)


@pytest.mark.parametrize(("reshard", "gathers"), [(True, 3 * (4 + 3)), (False, 4)])
def test_inner_micro_batches_send_no_gradients(reshard, gathers):
    """Of 4 units, the 3 blocks are gathered again in each backward pass, unless they stay whole for the step."""
    for rank in run_ranks(3, counted, Shard(3, reshard=reshard), Count(), {}):
        assert rank["steps"] == [{"reduce_scatter_single": 4, "all_gather_single": gathers}] * 3


def test_ranks_agree_to_skip_a_step_in_which_one_of_them_overflows():
    for rank in run_ranks(3, counted, Shard(3), Overflow(), {"precision": "fp16"}):
        assert rank["same"] and rank["scales"][2] == rank["scales"][1] / 2


def laid_out(place: Place) -> list[tuple[list[str], list[str]]]:
    ranks, model = Ranks(place, "cpu", "gloo", 30.0), Normed(width=5).model()
    mesh = line_of(ranks.new_group(), CPU, "shard")
    strategy = FSDP(model, list(model.blocks), mesh, None, CPU, reshard=True, offload=False, copied=False, step=int)
    names = {p: name for name, p in model.named_parameters()}
    found = []
    for unit in units(model):
        theirs = [p.sharded_param for group in unit._get_fsdp_state()._fsdp_param_groups for p in group.fsdp_params]
        found.append(([names[p] for p in own_parameters(unit)], [names[p] for p in theirs]))
    norm_of_one(strategy)
    strategy.unwrap()
    ranks.close()
    return found


def norm_of_one(strategy: FSDP) -> None:
    """The norm is over the rows of all ranks, also where there is a gradient for one parameter alone."""
    p = strategy.parameters[0]
    p.grad = torch.ones_like(p)
    assert strategy.clip(None).item() == pytest.approx(math.sqrt(p.numel()))
    assert strategy.clip(1.0).item() == pytest.approx(math.sqrt(p.numel()))
    assert strategy.clip(None).item() == pytest.approx(1.0, rel=1e-4)


def test_units_have_torchs_order_of_parameters():
    for found in run_ranks(3, laid_out):
        assert len(found) == 3 and all(ours == theirs and ours for ours, theirs in found)


def test_a_loss_that_leaves_the_model_out_is_refused_at_once():
    case = Case({"shard": Shard(3)}, recipe=Skipping(width=8))
    found = [each for (each,) in run_ranks(3, fit, [case])]
    messages = [each["refused"] for each in found]
    assert any("DataError: recipe.loss(): does not call the model on a micro-batch of weight 0" in m for m in messages)


class Scalar(Toy):
    def model(self) -> nn.Module:
        net = super().model()
        net.scale = nn.Parameter(torch.tensor(1.0))
        return net


class Mixed(Toy):
    def model(self) -> nn.Module:
        net = super().model()
        net.blocks[1].to(torch.float64)
        net.blocks[1][0].bias = nn.Parameter(torch.zeros(self.width))
        return net


class Tied(Toy):
    def model(self) -> nn.Module:
        net = super().model()
        net.blocks[1][0].weight = net.blocks[0][0].weight
        return net


class Flat(Toy):
    def model(self) -> nn.Module:
        return nn.Linear(8, 4)


REFUSED = [
    (Scalar(), {}, "callbacks.shard.stage=3: scale has no dimension, so no rows; give it the shape (1,), or use"),
    (Mixed(), {}, "of blocks.1 have different dtypes (blocks.1.0.weight float64, blocks.1.0.bias float32)"),
    (Tied(), {}, "blocks.0.0.weight and blocks.1.0.weight are one parameter in two blocks; name other blocks by"),
    (Flat(), {}, "callbacks.shard.blocks=null: no nn.ModuleList with members in this model, which has "),
    (Toy(), {"hybrid": 2}, "callbacks.shard.hybrid=2: does not divide the 3 ranks; give a divisor of 3 above 1"),
]


def test_what_cannot_be_sharded_is_refused_by_name():
    found = run_ranks(3, fit, [Case({"shard": Shard(3, **knobs)}, recipe=recipe) for recipe, knobs, _ in REFUSED])
    for rank in found:
        for each, (_, _, message) in zip(rank, REFUSED, strict=True):
            assert each["refused"].startswith("ConfigError: ") and message in each["refused"]
