"""1-bit Adam against a naive version in numpy, what is sent and kept back, and what a run saves."""

import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.loaders import KeepBatches
from support.messages import refuses
from support.quick import quick
from support.ranks import run_ranks
from torch import nn
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.ema import EMA
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.hierarchical import Hierarchical
from trainer.callbacks.local_sgd.callback import LocalSGD
from trainer.callbacks.onebit_adam.callback import OneBitAdam
from trainer.callbacks.overlap.callback import Overlap
from trainer.composition import arrange
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.errors import ConfigError
from trainer.optim.factories import adamw, sgd
from trainer.optim.schedule import Linear
from trainer.process.environment import Place
from trainer.trainer import Trainer

WORLD, STEPS, WARMUP = 3, 200, 20
BETAS, EPS, DECAY = (0.9, 0.99), 1e-6, 0.1


class Normed(nn.Sequential):
    """With running statistics, and parameters of one and of two dimensions."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
        )


class Of(Toy):
    def model(self) -> nn.Module:
        return Normed().double()


def adam(groups: Any) -> torch.optim.Optimizer:
    return adamw(groups, lr=0.01, betas=BETAS, eps=EPS, weight_decay=DECAY)


class Data(KeepBatches):
    """Each step's micro-batches with the share of the loss that this rank's have, its learning rate, its outcome."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[Any], float]] = []
        self.weights: list[np.ndarray] = []

    def on_step_end(self, trainer) -> None:
        shares = [weight * trainer.world / trainer.weight for weight in trainer.data.weights]
        lr = trainer.optimizer.param_groups[0]["lr"]
        batches = [{key: value.numpy() for key, value in batch.items()} for batch in self.batches]
        self.steps.append((list(zip(batches, shares, strict=True)), lr))
        self.weights.append(flat(trainer.module.parameters()))


class Errors(Callback):
    """What has been kept back, when training begins."""

    def on_fit_start(self, trainer) -> None:
        frozen = trainer.callbacks["onebit_adam"].frozen
        self.kept = frozen and (frozen.mean.worker_error.numpy().copy(), frozen.mean.server_error.numpy().copy())


def flat(tensors: Any) -> np.ndarray:
    return np.concatenate([tensor.detach().numpy().ravel().copy() for tensor in tensors])


def run(
    place: Place, warmup: int | None = WARMUP, name: str = "run", steps: int = STEPS, resume: str | None = None,
    clip: float | None = None, every: int = 5, view: bool = False,
) -> dict[str, Any]:  # fmt: skip
    data, errors, onebit = Data(), Errors(), OneBitAdam(warmup or 1)
    callbacks = {"onebit_adam": onebit, "errors": errors} if warmup else {}
    trainer = Trainer(
        Of(samples=60, dtype="float64"), {**callbacks, "data": data, "ema": EMA(0.8)}, adam,
        Linear(warmup=10, floor=0.1), batch=24, accumulate=2 if place.world == WORLD else None,
        options=Options(
            max_steps=steps, run_dir=f"runs/{name}", resume=resume, clip_norm=clip, validate_every=every,
            checkpoint=CheckpointOptions(every_steps=every, keep=99), ddp=DDPOptions(gradient_as_bucket_view=view),
        ),
        data=DataOptions(workers=0), place=place,
    )  # fmt: skip
    start = deepcopy(trainer.module)
    trainer.fit()
    return {
        "start": start, "steps": data.steps, "weights": data.weights, "validation": trainer.validation,
        "average": flat(trainer.eval_model.parameters()),
        "buffers": flat(trainer.module.buffers()), "errors": getattr(errors, "kept", None),
    }  # fmt: skip


def signs(values: np.ndarray, lengths: list[int], first: int) -> np.ndarray:
    """Of each parameter's part of elements `first` to `first + len(values)`: the signs times the mean magnitude."""
    sent, begin = np.zeros_like(values), 0
    for length in lengths:
        low, high = max(begin - first, 0), min(begin + length - first, len(values))
        if low < high:
            part = values[low:high]
            sent[low:high] = np.where(part >= 0, 1.0, -1.0) * np.mean(np.abs(part))
        begin += length
    return sent


def naive(runs: list[dict[str, Any]], clip: float | None) -> list[np.ndarray]:
    """One process, one vector of float64 for everything."""
    model, recipe = deepcopy(runs[0]["start"]), Toy()
    params = [p for p in model.parameters() if p.dim() == 2] + [p for p in model.parameters() if p.dim() == 1]
    lengths = [p.numel() for p in params]
    x, decay = flat(params), np.concatenate([np.full(p.numel(), DECAY * (p.dim() == 2)) for p in params])
    m, v = np.zeros_like(x), np.zeros_like(x)
    size = -(-len(x) // WORLD)
    kept_back, servers = [np.zeros_like(x) for _ in runs], [np.zeros_like(x[i : i + size]) for i in shards(x)]
    weights = []
    for t in range(1, len(runs[0]["steps"]) + 1):
        gradients, lr = [], runs[0]["steps"][t - 1][1]
        for run in runs:
            model.zero_grad()
            for batch, share in run["steps"][t - 1][0]:
                tensors = {key: torch.from_numpy(value) for key, value in batch.items()}
                (recipe.loss(model, tensors) * share).backward()
            gradients.append(flat(p.grad for p in params))
        if t <= WARMUP:
            g = clipped(sum(gradients) / WORLD, clip)
            m, v, seen = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g**2, t
        else:
            arrived = []
            for rank, g in enumerate(gradients):
                own = kept_back[rank] + BETAS[0] * m + (1 - BETAS[0]) * clipped(g, clip)
                arrived.append(np.concatenate([signs(own[i : i + size], lengths, i) for i in shards(x)]))
                kept_back[rank] = own - arrived[-1]
            mean = sum(arrived) / WORLD
            for server, i in enumerate(shards(x)):
                own = servers[server] + mean[i : i + size]
                m[i : i + size] = signs(own, lengths, i)
                servers[server] = own - m[i : i + size]
        x = x - lr * decay * x
        x = x - lr * m / (1 - BETAS[0] ** t) / (np.sqrt(v / (1 - BETAS[1] ** seen)) + EPS)
        for p, part in zip(params, np.split(x, np.cumsum(lengths)[:-1]), strict=True):
            p.data = torch.from_numpy(part.copy()).view_as(p)
        weights.append(flat(model.parameters()))
    return weights


def shards(x: np.ndarray) -> range:
    return range(0, len(x), -(-len(x) // WORLD))


def clipped(g: np.ndarray, norm: float | None) -> np.ndarray:
    return g if norm is None else g * min(1.0, norm / (np.linalg.norm(g) + 1e-6))


@pytest.mark.parametrize(("steps", "clip"), [pytest.param(STEPS, None, marks=pytest.mark.slow), (2 * WARMUP, 0.3)])
def test_the_steps_are_those_of_a_naive_version(steps, clip, tmp_path):
    """With micro-batches, uneven shares, a learning rate that changes, and decay for matrices only."""
    runs = run_ranks(WORLD, run, WARMUP, "run", steps, None, clip, STEPS)
    expected = naive(runs, clip)
    for rank in runs:
        for step in range(19, steps, 20):
            np.testing.assert_allclose(rank["weights"][step], expected[step], rtol=1e-6, atol=1e-7)
        assert [w.tobytes() for w in rank["weights"]] == [w.tobytes() for w in runs[0]["weights"]]
        assert rank["average"].tobytes() == runs[0]["average"].tobytes()
    assert np.abs(expected[-1] - expected[WARMUP]).max() > 0.05


def test_the_warm_up_is_plain_adamw(tmp_path):
    plain, *_ = run_ranks(WORLD, run, None, "plain", WARMUP + 2)
    ours, *_ = run_ranks(WORLD, run, WARMUP, "ours", WARMUP + 2)
    same = [a.tobytes() == b.tobytes() for a, b in zip(plain["weights"], ours["weights"], strict=True)]
    assert same == [True] * WARMUP + [False] * 2


def test_one_rank_has_plain_adamw(tmp_path):
    (plain,), (ours,) = run_ranks(1, run, None, "plain", 10), run_ranks(1, run, 2, "ours", 10)
    assert [a.tobytes() for a in plain["weights"]] == [b.tobytes() for b in ours["weights"]]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of 30 steps, in its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("onebit"))
        yield run_ranks(WORLD, run, WARMUP, "run", 30)


@pytest.mark.parametrize("step", quick([25, 20, 15]))
def test_a_resume_has_the_same_bits(straight, step):
    """Before the warm-up ends, as it ends, and after."""
    resumed = run_ranks(WORLD, run, WARMUP, f"from-{step}", 30, f"ckpt/run/step-000000{step}")
    for a, b in zip(straight, resumed, strict=True):
        assert [w.tobytes() for w in a["weights"][step:]] == [w.tobytes() for w in b["weights"]]
        assert a["buffers"].tobytes() == b["buffers"].tobytes() == straight[0]["buffers"].tobytes()
        assert a["average"].tobytes() == b["average"].tobytes()
        assert a["validation"] == b["validation"]


@pytest.mark.slow
def test_gradients_that_are_views_of_buckets_have_the_same_bits(straight):
    """DDP's buckets are not read any more, nor written, once it is out of the way."""
    views = run_ranks(WORLD, run, WARMUP, "views", 30, None, None, 5, True)
    for plain, other in zip(straight, views, strict=True):
        assert [w.tobytes() for w in plain["weights"]] == [w.tobytes() for w in other["weights"]]


@pytest.mark.slow
def test_at_another_number_of_ranks_nothing_that_was_kept_back_is_lost(straight):
    before = run_ranks(WORLD, run, WARMUP, "same", 30, "ckpt/run/step-00000030", None, STEPS)
    assert np.abs(total(before)).max() > 0
    for world in (2, 4):
        after = run_ranks(world, run, WARMUP, f"on-{world}", 70, "ckpt/run/step-00000030", None, STEPS)
        np.testing.assert_allclose(total(after), total(before), rtol=1e-12)
        assert after[0]["validation"]["val/loss"] < straight[0]["validation"]["val/loss"]
        assert len({rank["weights"][-1].tobytes() for rank in after}) == 1
    (alone,) = run_ranks(1, run, WARMUP, "on-1", 32, "ckpt/run/step-00000030", None, STEPS)
    assert alone["errors"] is None
    assert "onebit_adam does nothing on one rank" in Path("runs/on-1/logs/rank0.log").read_text()


@pytest.mark.slow
def test_nor_at_the_next_change(straight):
    """What other ranks have of a shard is not saved a second time, as it was."""
    run_ranks(2, run, WARMUP, "two", 40, "ckpt/run/step-00000030", None, STEPS)
    before, after = (
        run_ranks(world, run, WARMUP, f"then-{world}", 40, "ckpt/two/step-00000040", None, STEPS) for world in (2, 4)
    )
    np.testing.assert_allclose(total(after), total(before), rtol=1e-12)


def total(runs: list[dict[str, Any]]) -> np.ndarray:
    """The part that the errors have in the next mean."""
    return np.mean([run["errors"][0] for run in runs], 0) + np.concatenate([run["errors"][1] for run in runs])


def counted(place: Place) -> tuple[list[int], int]:
    """Bytes that this rank sends to others in each step, and the floats in all-reduces after the warm-up."""
    send, reduce = dist.send, dist.all_reduce
    sent, floats, per_step = [0], [0], []

    def counted_send(tensor, *args, **kwargs):
        sent[0] += tensor.nbytes
        return send(tensor, *args, **kwargs)

    def all_reduce(tensor, *args, **kwargs):
        floats[0] += tensor.numel() if tensor.is_floating_point() else 0
        return reduce(tensor, *args, **kwargs)

    class Book(Callback):
        def on_step_end(self, trainer) -> None:
            per_step.append(sent[0])
            sent[0] = 0

    dist.send, dist.all_reduce = counted_send, all_reduce
    try:
        Trainer(
            Toy(samples=40, width=256), {"onebit_adam": OneBitAdam(2), "book": Book()}, adam, batch=12,
            options=Options(max_steps=4), data=DataOptions(workers=0), place=place,
        ).fit()  # fmt: skip
    finally:
        dist.send, dist.all_reduce = send, reduce
    return per_step, floats[0]


def test_the_bytes_are_those_of_the_card(tmp_path):
    parameters = sum(p.numel() for p in Toy(width=256).model().parameters())
    for per_step, floats in run_ranks(WORLD, counted):
        assert per_step[:2] == [0, 0]
        assert per_step[2:] == pytest.approx([2 * (WORLD - 1) / WORLD * parameters / 8] * 2, rel=0.03)
        assert floats == 0  # DDP's own reducer, in C++, has the warm-up


@pytest.mark.parametrize("other", ["fp16", "find_unused_parameters", "static_graph"])
def test_what_it_refuses(other):
    with pytest.raises(ConfigError, match=f"onebit_adam and {other} can't run together: .*(leave|use) "):
        arrange({"onebit_adam": OneBitAdam()}, {other})


class Sums(Callback):
    """A user's own way to sum, around which 1-bit Adam would go."""

    role = Role.REDUCE


@pytest.mark.parametrize(
    ("other", "role"),
    [
        (Overlap, "OPTIMIZER"), (GradCompress, "COMPRESS"), (LocalSGD, "SYNC"), (Hierarchical, "REDUCE"),
        (Sums, "REDUCE"),
    ],
)  # fmt: skip
def test_it_does_what_others_would(other, role):
    with pytest.raises(ConfigError, match=rf"both decide .* \(role {role}\): leave one out"):
        arrange({"onebit_adam": OneBitAdam(), "other": other()}, set())


def refused(place: Place, optimizer: Any) -> str:
    with pytest.raises(ConfigError) as refusal:
        Trainer(Toy(), {"onebit_adam": OneBitAdam()}, optimizer, batch=12, place=place)
    return str(refusal.value)


def amsgrad(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, amsgrad=True)


@pytest.mark.parametrize(
    ("optimizer", "words"), [(sgd, "optimizer=SGD: .*use optimizer=adamw"), (amsgrad, "set optimizer.amsgrad=false")]
)
def test_another_optimizer_is_refused(optimizer, words, tmp_path):
    for message in run_ranks(2, refused, optimizer):
        assert re.search(words, message)


def without_variance(place: Place) -> str:
    options = Options(max_steps=2, run_dir="runs/sgd")
    Trainer(Toy(), {}, sgd, batch=12, options=options, data=DataOptions(workers=0), place=place).fit()
    options = Options(max_steps=4, run_dir="runs/adam", resume="ckpt/sgd", accept=["optimizer", "callbacks"])
    later = replace(place, store=f"{place.store}-later")
    trainer = Trainer(
        Toy(), {"onebit_adam": OneBitAdam(1)}, adam, batch=12, options=options, data=DataOptions(workers=0), place=later
    )
    with pytest.raises(ConfigError) as refusal:
        trainer.fit()
    trainer.close()
    return str(refusal.value)


def test_a_variance_that_is_not_there_is_not_frozen(tmp_path):
    """Where a run goes on that had another optimizer."""
    for message in run_ranks(2, without_variance):
        assert message.startswith("callbacks.onebit_adam.warmup_steps=1: at step 2 AdamW has no variance to freeze; ")


def test_no_warm_up_is_refused():
    with refuses("callbacks.onebit_adam.warmup_steps=0", "1"):
        OneBitAdam(0)
