"""PipeDream-2BW against a loop on one process that has both versions of the weights in full."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.pipelines import Fails, Losses, same_bits, whole
from support.quick import quick
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import default_collate
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.nan_guard import NanGuard
from trainer.callbacks.pipeline import PipelineParallel
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError
from trainer.parallel.forward_backward import weigh_loss
from trainer.process.environment import Place
from trainer.trainer import Trainer

STEPS = 6
THREE = {"stages": 3}


class Naive(Callback):
    """W(t+1) = W(t) - step(gradient of batch t-1 at W(t-1)). Two replicas are two ranks."""

    def __init__(self) -> None:
        self.before: tuple[Any, ...] = ()

    def wrap_forward_backward(self, trainer, run: Callable[..., Any]) -> Any:
        def passes(data: Any, total: Callable[[], int]) -> list[Tensor]:
            if trainer.rehearsing:
                return run(data, total)
            loss = trainer.precision.cast(trainer.recipe.loss)
            batches = list(data)
            with torch.no_grad():
                losses = [loss(trainer.module, batch) * bool(weight) for batch, weight in batches]
            if self.before:
                old, earlier, items = self.before
                for batch, weight in earlier:
                    weigh_loss(loss(old, batch), weight * trainer.world, items).backward()
                for p, other in zip(trainer.module.parameters(), old.parameters(), strict=True):
                    p.grad = other.grad
                    if trainer.world > 1:
                        dist.all_reduce(p.grad)
                        p.grad /= trainer.world
            self.before = deepcopy(trainer.module), batches, total()
            self.before[0].zero_grad()
            return losses

        return passes


def train(place: Place, knobs: dict[str, Any] | None, run: dict[str, Any] | None = None) -> dict[str, Any]:
    run = {"batch": 12, "accumulate": 6, "dropout": 0.0, "steps": STEPS, "resume": None, "clip": 0.05, **(run or {})}
    losses = Losses()
    first = PipelineParallel(**{"schedule": "pipedream_2bw", **knobs}) if knobs is not None else Naive()
    trainer = Trainer(
        run.get("recipe", Toy)(samples=48, depth=6, dropout=run["dropout"]),
        {
            "pipeline" if knobs is not None else "naive": first,
            **{name: make() for name, make in run.get("others", {}).items()},
            "losses": losses,
        },
        run.get("optimizer", adamw),
        batch=run["batch"],
        accumulate=run["accumulate"],
        options=Options(
            max_steps=run["steps"], log_every_steps=run.get("log", 1), clip_norm=run["clip"], timeout_s=20.0,
            resume=run["resume"], precision=run.get("precision", "fp32"), validate_every=run.get("validate"),
            checkpoint=CheckpointOptions(every_steps=3, keep=5),
        ),
        data=DataOptions(workers=0),
        place=place,
    )  # fmt: skip
    trainer.fit()
    assert trainer.lag == (not first.exact)  # the weights are a step behind
    own = {name: p.detach().numpy() for name, p in trainer.module.named_parameters() if p.requires_grad}
    return {
        "weights": own,
        "losses": losses.seen,
        "validation": trainer.validation,
        "saved": str(trainer.checkpoint),
    }


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


def momentum(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("stages", "cut", "run"),
    quick(
        [
            (2, "auto", {"accumulate": 2}),
            (3, [1, 5], {}),
            (3, [2, 3], {"clip": None, "optimizer": momentum}),
            (4, [1, 2, 5], {"accumulate": 4}),
            (3, "auto", {"precision": "bf16"}),
            (3, [3, 4], {"run_ahead": 3}),
        ],
        2,
    ),
)
def test_weights_and_losses_are_those_of_a_naive_loop(here, stages, cut, run):
    (alone,) = run_ranks(1, train, None, run)
    knobs = {"stages": stages, "cut": cut, "run_ahead": run.get("run_ahead", 1)}
    same_bits(run_ranks(stages, train, knobs, run), alone)


def test_a_naive_loop_is_not_plain_training(here):
    (alone,), (plain,) = run_ranks(1, train, None), run_ranks(1, train, None, {"others": {"naive": Callback}})
    assert alone["losses"][:6] == plain["losses"][:6] and alone["losses"][-7:] != plain["losses"][-7:]
    assert alone["losses"][6] == 0.0  # the norm of the first step, which has no gradients


@pytest.mark.slow
def test_two_pipelines_are_two_ranks(here):
    """A sum of two is the same in either order, so the bits are."""
    run = {"batch": 24, "accumulate": 3}
    alone = run_ranks(2, train, None, run)
    ranks = run_ranks(4, train, {}, run)
    for replica in (0, 1):
        own = ranks[replica::2]  # rank = stage * replicas + replica
        found = whole(own)
        for name, value in alone[replica]["weights"].items():
            assert (found[name] == value).all(), name
        assert [rank["losses"][:-1] for rank in own] == [alone[replica]["losses"][:-1]] * 2


class Ragged(Toy):
    """Some micro-batches lose a sample, as one that can't be read; some weigh nothing."""

    def collate(self, samples: list[Any]) -> Any:
        keep = len(samples) - int(samples[0]["mask"].sum() == 2)
        batch = default_collate(samples[:keep])
        if samples[0]["mask"].sum() == 4:
            batch["mask"].zero_()
        return batch

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(model, {**batch, "mask": batch["mask"] if batch["mask"].any() else batch["mask"] + 1})


@pytest.mark.slow
def test_micro_batches_of_other_sizes_and_weights(here):
    run = {"recipe": Ragged, "accumulate": 3}
    (alone,) = run_ranks(1, train, None, run)
    assert alone["losses"].count(0.0) > 1  # beside the norm of the first step
    same_bits(run_ranks(3, train, THREE, run), alone)


@pytest.mark.slow
def test_recomputation_reads_the_weights_of_its_batch(here):
    (alone,) = run_ranks(1, train, None)
    same_bits(run_ranks(3, train, THREE, {"others": {"activation_checkpoint": ActivationCheckpoint}}), alone)


class Half(nn.Module):
    def __init__(self, weight: nn.Parameter, turned: bool) -> None:
        super().__init__()
        self.weight, self.turned = weight, turned

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.T)[:, :4] if self.turned else x @ self.weight


class Tied(Toy):
    def model(self) -> nn.Module:
        net: Any = super().model().double()
        weight = nn.Parameter(torch.linspace(-1, 1, 8 * self.width, dtype=torch.float64).view(8, self.width))
        net.first, net.last = Half(weight, False), Half(weight, True)
        return net

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(model, {name: value.double() for name, value in batch.items()})


@pytest.mark.slow
def test_a_tied_parameter_gets_the_sum_of_two_stages(here):
    """The gradients are summed per stage first, so all is the naive loop's to rounding."""
    run = {"recipe": Tied}
    (alone,) = run_ranks(1, train, None, run)
    ranks = run_ranks(3, train, THREE, run)
    assert (ranks[0]["weights"]["first.weight"] == ranks[2]["weights"]["first.weight"]).all()
    for name, value in alone["weights"].items():
        assert np.abs(whole(ranks)[name] - value).max() < 1e-12, name
    assert np.allclose(ranks[1]["losses"], alone["losses"], rtol=1e-12, atol=0)


def Bf16() -> GradCompress:
    return GradCompress("topk", density=0.3)


@pytest.mark.parametrize(
    ("world", "run"),
    [(3, {"optimizer": momentum}), pytest.param(4, {"others": {"grad_compress": Bf16}}, marks=pytest.mark.slow)],
)
def test_a_run_resumes_bit_for_bit(here, world, run):
    """Also with dropout, two replicas and a codec; the gradients of the last batch are in the checkpoint."""
    knobs = {"stages": 3, "cut": [1, 5]} if world == 3 else {"cut": [2]}
    run = {**run, "dropout": 0.3}
    straight = run_ranks(world, train, knobs, run)
    first = run_ranks(world, train, knobs, {**run, "steps": 3})
    resumed = run_ranks(world, train, knobs, {**run, "resume": first[0]["saved"]})
    for rank, other in zip(resumed, straight, strict=True):
        assert rank["losses"] == other["losses"][len(first[0]["losses"]) :]
        assert all((rank["weights"][name] == value).all() for name, value in other["weights"].items())


@pytest.mark.slow
def test_a_validation_changes_no_bits(here):
    """It drains the pipeline, as a step that is not logged does not."""
    knobs = {"stages": 3, "cut": [1, 4]}
    often = run_ranks(3, train, knobs, {"validate": 2, "log": 1})
    never = run_ranks(3, train, knobs, {"log": 50})
    for rank, other in zip(often, never, strict=True):
        assert rank["losses"][:-1] == other["losses"][:-1]
        assert all((rank["weights"][name] == value).all() for name, value in other["weights"].items())


@pytest.mark.slow
def test_another_cut_schedule_or_number_of_ranks_drops_the_last_gradients(here):
    half = run_ranks(3, train, {"stages": 3, "cut": [2, 4]}, {"steps": 3})[0]["saved"]
    end = {"resume": half}
    plain = run_ranks(3, train, {"stages": 3, "schedule": "1f1b"}, end)
    (alone,) = run_ranks(1, train, None, {**end, "others": {"naive": Callback}})  # says so in the log
    same_bits(plain, alone)  # as from a checkpoint without them
    (naive,) = run_ranks(1, train, None, end)  # whose first step applies nothing
    same_bits(run_ranks(3, train, {"stages": 3, "cut": [1, 5]}, end), naive)
    two = run_ranks(4, train, {"cut": [3]}, {"steps": 3, "accumulate": 3})[0]["saved"]  # two replicas
    (naive,) = run_ranks(1, train, None, {"resume": two})
    same_bits(run_ranks(2, train, {"cut": [3]}, {"resume": two}), naive)
    logs = "".join(path.read_text() for path in Path("runs").glob("*/logs/*.log"))
    assert logs.count("so the gradients of the last batch are dropped") >= 3
    assert "callback pipeline is gone from the run, so its saved state is dropped" in logs


def fails(place: Place) -> str:
    try:
        train(place, THREE, {"recipe": Fails if place.rank == 2 else Toy})
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


def test_a_rank_that_fails_ends_the_others(here):
    *others, own = run_ranks(3, fails)
    assert own == "ValueError: broken on purpose"
    assert all(error.startswith(("DistBackendError", "RuntimeError", "DistNetworkError")) for error in others), others


class Keeps(Toy):
    """The model keeps a parameter where no second version can be."""

    def model(self) -> nn.Module:
        net: Any = super().model()
        for block in net.blocks:
            block[1] = Kept(block[0].bias)
        return net


class Kept(nn.Module):
    def __init__(self, bias: nn.Parameter) -> None:
        super().__init__()
        self.kept = [bias]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.kept[0])


def refused(place: Place, run: dict[str, Any]) -> str:
    try:
        train(place, {**THREE, **run.get("knobs", {})}, run)
    except ConfigError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"accumulate": 1}, "callbacks.pipeline.schedule=pipedream_2bw: needs accumulate=2 or more for 3 stages"),
        ({"others": {"nan_guard": NanGuard}}, "nan_guard and pipeline can't run together: nan_guard reads gradients"),
        ({"precision": "fp16"}, "pipeline and fp16 can't run together"),
        ({"knobs": {"run_ahead": 0}}, "callbacks.pipeline.run_ahead=0: must be at least 1"),
        ({"knobs": {"run_ahead": 4}}, "pipedream_2bw, run_ahead=4: needs accumulate=8 or more for 3 stages"),
        ({"knobs": {"run_ahead": 2, "schedule": "1f1b"}}, "callbacks.pipeline.run_ahead=2: is for"),
        ({"recipe": Keeps}, "the model keeps a parameter outside its module"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(here, run, message):
    assert all(message in error for error in run_ranks(3, refused, run))
