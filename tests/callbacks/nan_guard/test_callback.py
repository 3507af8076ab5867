"""What is not finite, and spikes: every rank decides the same, nothing of the step stays, and it is written down."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.callbacks import CODECS
from support.quick import quick
from support.ranks import run_ranks
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.ema import EMA
from trainer.callbacks.nan_guard.callback import NanGuard
from trainer.callbacks.shard.callback import Shard
from trainer.checkpoint.serialize import optimizer_state
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError, NumericsError
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")

BAD = 5  # the step of the bad loss


class Bad(Toy):
    """The loss of one step is `factor` times as large, on one rank."""

    trainer: Trainer | None = None

    def __init__(self, factor: float, rank: int, step: int = BAD, until: int = BAD) -> None:
        super().__init__()
        self.factor, self.rank, self.steps = factor, rank, range(step - 1, until)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        rank = dist.get_rank() if dist.is_initialized() else 0
        bad = self.trainer is not None and self.trainer.step in self.steps and rank == self.rank and model.training
        return loss * self.factor if bad else loss


class Watch(Callback):
    """Copies of weights and optimizer after each step."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, Tensor]] = {}

    def on_fit_start(self, trainer: Trainer) -> None:
        trainer.recipe.trainer = trainer

    def on_step_end(self, trainer: Trainer) -> None:
        moments = optimizer_state(trainer.optimizer, trainer.module)
        flat = {f"{name} {key}": value for name, values in moments.items() for key, value in values.items()}
        self.seen[trainer.step] = {k: v.detach().clone() for k, v in {**trainer.module.state_dict(), **flat}.items()}


def train(
    place: Place, guard: dict[str, Any], factor: float = float("nan"), rank: int = 1, max_steps: int = 8,
    more: dict[str, Callback] | None = None, resume: str | None = None, bad: tuple[int, int] = (BAD, BAD),
    name: str = "r", save: int = 4, clip_value: float | None = None,
) -> tuple[dict[int, dict[str, Tensor]], list[list[Any]], list[Any]]:  # fmt: skip
    watch, nan_guard = Watch(), NanGuard(**guard)
    trainer = Trainer(
        Bad(factor, rank, *bad), {"watch": watch, "nan_guard": nan_guard, **(more or {})}, batch=12, place=place,
        data=DataOptions(workers=0, shuffle_shards=5, shuffle_window=4),
        options=Options(
            max_steps=max_steps, run_dir=f"runs/{name}", resume=resume, log_every_steps=1, clip_value=clip_value,
            checkpoint=CheckpointOptions(every_steps=save),
        ),
    )  # fmt: skip
    trainer.fit()
    kept = [t.clone() for c in (more or {}).values() for k in c.codec.kept.values() for t in k.flats.values()]  # pyright: ignore
    return watch.seen, nan_guard.left_out, kept


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


NOT_FINITE = "loss or gradient not finite on 3 of 3 rank(s)"


def test_a_step_is_left_out_on_all_ranks():
    ranks = run_ranks(3, train, {"action": "skip"})
    for seen, left_out, _ in ranks:
        assert left_out == [[BAD, BAD, NOT_FINITE]]
        assert equal(seen[BAD], seen[BAD - 1]) and not equal(seen[BAD + 1], seen[BAD])
        assert all(equal(seen[step], ranks[0][0][step]) for step in seen)
        assert all(torch.isfinite(value).all() for value in seen[8].values())


def clipped(place: Place) -> Any:
    return train(place, {"action": "skip"}, clip_value=0.01)


def test_a_step_without_gradients_has_none_to_clip_by_value():
    for seen, left_out, _ in run_ranks(3, clipped):
        assert left_out == [[BAD, BAD, NOT_FINITE]] and equal(seen[BAD], seen[BAD - 1])


@pytest.mark.slow
def test_until_it_acts_the_bits_are_those_without_it():
    plain = run_ranks(3, train, {"action": "raise"}, 1.0)
    guards = {"a": {"action": "rollback", "every": 2}, "b": {"action": "skip", "loss_spike": 9.0, "norm_spike": 9.0}}
    for name, guard in guards.items():
        ranks = run_ranks(3, train, guard, 1.0, 1, 8, None, None, (BAD, BAD), name)
        assert all(equal(a[0][8], b[0][8]) for a, b in zip(ranks, plain, strict=True))


def every_third(place: Place) -> Any:
    return train(place, {"action": "rollback", "every": 3}, save=8)


def test_rollback_goes_back_to_the_copy():
    for seen, left_out, _ in run_ranks(3, every_third):
        assert left_out == [[4, BAD, NOT_FINITE]]
        assert equal(seen[BAD], seen[3]) and not equal(seen[BAD], seen[4])


def until(place: Place, max_steps: int, resume: str | None, name: str) -> Any:
    """With residuals that are each rank's own, and a bad step after the checkpoint of step 4."""
    more = {"c": CODECS["topk"]()}
    return train(place, {"action": "rollback"}, max_steps=max_steps, more=more, resume=resume, bad=(7, 7), name=name)


def test_a_resumed_run_goes_back_to_where_the_uninterrupted_one_does():
    straight = run_ranks(3, until, 10, None, "straight")
    run_ranks(3, until, 6, None, "r")
    resumed = run_ranks(3, until, 10, "ckpt/r/step-00000004", "r")
    for (seen, left_out, kept), (again, left_out_again, kept_again) in zip(straight, resumed, strict=True):
        assert [entry[:2] for entry in left_out] == [[5, 7]]
        assert left_out == left_out_again and all(equal(seen[step], again[step]) for step in range(5, 11))
        assert kept and all(map(torch.equal, kept, kept_again))


def test_raise_ends_all_ranks_with_one_line():
    with pytest.raises(Exception, match=r"NumericsError: callbacks\.nan_guard: step 5: loss or gradient not"):
        run_ranks(3, train, {"action": "raise"})


def train_long(place: Place, guard: dict[str, Any], factor: float, name: str) -> Any:
    seen, left_out, _ = train(place, guard, factor, max_steps=26, bad=(24, 24), name=name)
    return {step: seen[step] for step in (23, 24)}, left_out


@pytest.mark.slow
@pytest.mark.parametrize(("key", "name"), [("loss_spike", "loss"), ("norm_spike", "gradient norm")])
def test_a_spike_on_one_rank_is_a_spike_for_all(key, name):
    for seen, left_out in run_ranks(3, train_long, {key: 10.0}, 1e3, "a"):
        assert [entry[:2] for entry in left_out] == [[24, 24]] and left_out[0][2].startswith(f"{name} ")
        assert "more than 10 times the usual" in left_out[0][2] and equal(seen[24], seen[23])
    assert all(left_out == [] for _, left_out in run_ranks(3, train_long, {key: 10.0}, 1.5, "b"))


SHARDED: list[dict[str, Any]] = [{"stage": 2}, {"stage": 3}, {"stage": 3, "hybrid": 2}]


class Norms(Callback):
    """The norm of each step, and the running mean that the guard has after it."""

    def __init__(self, guard: NanGuard) -> None:
        self.guard, self.norms, self.usual = guard, list[float](), list[float]()

    def on_step_end(self, trainer: Trainer) -> None:
        self.norms.append(trainer.metrics["train/grad_norm"])
        self.usual.append(self.guard.usual["gradient norm"])


def norms(place: Place) -> list[tuple[list[float], list[float], list[list[Any]]]]:
    """Without `shard`, then with each of `SHARDED`. The loss of step 24 is 1000 times as large, on one rank."""
    found = []
    for i, knobs in enumerate([None, *SHARDED]):
        guard = NanGuard(norm_spike=10.0)
        watch, recipe = Norms(guard), Bad(1e3, 1, 24, 24)
        trainer = recipe.trainer = Trainer(
            recipe, {"watch": watch, "nan_guard": guard, **({"shard": Shard(**knobs)} if knobs else {})}, batch=12,
            place=replace(place, store=f"{place.store}-{i}"), data=DataOptions(workers=0),
            options=Options(
                max_steps=25, run_dir=f"runs/{i}", log_every_steps=1, validate_every=None,
                checkpoint=CheckpointOptions(every_steps=None),
            ),
        )  # fmt: skip
        trainer.fit()
        found.append((watch.norms, watch.usual, guard.left_out))
    return found


@pytest.mark.slow
def test_the_norm_is_that_of_all_ranks_gradients():
    """A rank of `shard` has some of them. Until the spike, the running mean is the mean of all steps before."""
    for (plain, means, left_out), *sharded in run_ranks(4, norms):
        usual = [sum(plain[:n]) / n for n in range(1, 24)]
        assert means[:23] == pytest.approx(usual, rel=1e-6)
        assert [entry[:2] for entry in left_out] == [[24, 24]] and left_out[0][2].startswith("gradient norm ")
        for knobs, (own, own_means, own_left_out) in zip(SHARDED, sharded, strict=True):
            assert own_left_out[0][:2] == [24, 24] and len(own_left_out) == 1
            if knobs["stage"] < 3:
                assert (own, own_means, own_left_out) == (plain, means, left_out)
            assert own == pytest.approx(plain, rel=1e-4) and own_means == pytest.approx(means, rel=1e-4)


def compressed(place: Place, action: str, codec: str) -> Any:
    return train(place, {"action": action, "every": 1}, more={"c": CODECS[codec]()})


@pytest.mark.parametrize("codec", quick(["topk", "powersgd"]))
@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_what_a_codec_keeps_back_gets_finite_again(action, codec):
    ranks = run_ranks(3, compressed, action, codec)
    for seen, _, kept in ranks:
        assert kept and all(torch.isfinite(flat).all() for flat in kept)
        assert equal(seen[8], ranks[0][0][8]) and not equal(seen[8], seen[BAD])


def test_too_many_in_a_row_end_the_run():
    with pytest.raises(NumericsError, match=r"step 5: .* on 1 of 1 rank\(s\), 3 in a row; try a smaller"):
        train(Place(), {"action": "skip", "most": 2}, rank=0, bad=(3, 8))
    assert len(train(Place(), {"action": "skip", "most": 2}, rank=0, bad=(3, 4), name="s")[1]) == 2


def test_what_was_left_out_is_saved(capsys):
    train(Place(), {"action": "skip"}, rank=0, max_steps=6)
    assert "step 5: loss or gradient not finite on 1 of 1 rank(s); the step is left out" in capsys.readouterr().out
    lines = Path("runs/r/logs/rank0.log").read_text()
    assert "left out" in lines
    _, left_out, _ = train(Place(), {"action": "skip"}, rank=0, max_steps=9, resume="auto", bad=(7, 7))
    assert [entry[:2] for entry in left_out] == [[5, 5], [7, 7]]


@pytest.mark.slow
def test_rollback_takes_the_average_back_too():
    ema = EMA(decay=0.5)
    averages: dict[int, Tensor] = {}

    class After(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            averages[trainer.step] = next(ema.model.parameters()).clone()

    watch, guard = Watch(), NanGuard("rollback", every=3)
    trainer = Trainer(
        Bad(float("nan"), 0), {"watch": watch, "guard": guard, "ema": ema, "after": After()}, batch=12, place=Place(),
        data=DataOptions(workers=0, shuffle_shards=5, shuffle_window=4), options=Options(max_steps=6, run_dir="runs/r"),
    )  # fmt: skip
    trainer.fit()
    weights = watch.seen[3][next(name for name, _ in trainer.module.named_parameters())]
    assert guard.left_out[0][:2] == [4, 5]
    assert torch.equal(averages[5], torch.lerp(averages[3], weights, 0.5))


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"action": "stop"}, "callbacks.nan_guard.action=stop: must be raise or skip or rollback"),
        ({"loss_spike": 1.0}, "callbacks.nan_guard.loss_spike=1.0: must be more than 1"),
        ({"every": 0}, "callbacks.nan_guard.every=0: must be at least 1"),
    ],
)
def test_knobs(knobs, said):
    with pytest.raises(ConfigError, match=said):
        NanGuard(**knobs)
