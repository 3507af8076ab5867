"""Sparse gradients against dense ones, on one rank and on three; clipping; one line for what can't carry them."""

from functools import partial
from typing import Any

import pytest
import torch
from support.messages import refuses
from support.quick import quick
from support.ranks import run_ranks
from support.runs import make
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trainer.callback import Callback
from trainer.callbacks.ema import EMA
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.nan_guard.callback import NanGuard
from trainer.callbacks.optimizer_in_backward import OptimizerInBackward
from trainer.callbacks.overlap.callback import Overlap
from trainer.callbacks.shard.callback import Shard
from trainer.errors import ConfigError
from trainer.optim.factories import adagrad, adamw, lamb, sgd
from trainer.parallel.sparse import gradients, refuse_sparse
from trainer.parallel.strategy import clip_gradients, clip_values
from trainer.process.environment import Place

OPTIMIZERS = {"sgd": partial(sgd, momentum=0.0), "adagrad": partial(adagrad, lr=0.1)}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip_norm": {"clip_norm": 0.05},
    "clip_value": {"clip_value": 1e-3},
    "bf16": {"precision": "bf16"},
}
ROWS, BATCH, STEPS = 100, 24, 5


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.word = nn.Embedding(ROWS, 8, sparse=sparse)
        self.bag = nn.EmbeddingBag(ROWS, 8, mode="sum", sparse=sparse)
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.word(x[:, 0]) + self.bag(x)).squeeze(1)


class Task:
    def __init__(self, sparse: bool) -> None:
        self.sparse = sparse

    def model(self) -> nn.Module:
        return Words(self.sparse)

    def data(self, split: str) -> TensorDataset:
        x = torch.randint(0, 60, (240, 3), generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, (x[:, 0] % 2).float())

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]).float(), batch[1])


class Kinds(Callback):
    """Notes which gradients are sparse when the optimizer steps."""

    def __init__(self) -> None:
        self.sparse: list[set[str]] = []

    def on_before_optimizer_step(self, trainer) -> None:
        named = trainer.module.named_parameters()
        self.sparse.append({name for name, p in named if p.grad is not None and p.grad.is_sparse})


def train(place: Place, optimizer: str) -> dict[tuple[str, bool], dict[str, Any]]:
    found = {}
    for setting, options in SETTINGS.items():
        for sparse in (False, True):
            callbacks = {"ema": EMA(0.9), "kinds": (kinds := Kinds())}
            trainer = make(
                Task(sparse), callbacks, OPTIMIZERS[optimizer], batch=BATCH, place=place, max_steps=STEPS,
                run_dir=f"runs/{place.world}-{setting}-{sparse}", log_every_steps=1, check_replicas_every=1, **options,
            )  # fmt: skip
            trainer.fit()
            assert (trainer.reduce is not None) == (sparse and place.world > 1)  # DDP's own corrupts memory
            weights = {key: value.detach().numpy().copy() for key, value in trainer.module.named_parameters()}
            norm = trainer.last_metrics["train/grad_norm"]
            found[setting, sparse] = {"weights": weights, "norm": norm, "sparse": kinds.sparse}
    return found


@pytest.mark.parametrize("optimizer", ["adagrad", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_weights_are_those_of_dense_gradients(world: int, optimizer: str, tmp_path) -> None:
    """All but the order in which values of a row are added is the same."""
    for rank in run_ranks(world, train, optimizer):
        for setting in SETTINGS:
            dense, own = rank[setting, False], rank[setting, True]
            assert dense["sparse"] == [set()] * STEPS and own["sparse"] == [{"word.weight", "bag.weight"}] * STEPS
            assert own["norm"] == pytest.approx(dense["norm"], rel=1e-3 if setting == "bf16" else 1e-5)
            for name, value in own["weights"].items():
                bound = 2e-3 if setting == "bf16" else 2e-6
                assert abs(value - dense["weights"][name]).max() <= bound, (setting, name)


class Long(Task):
    def data(self, split: str) -> TensorDataset:
        x = torch.randint(0, 60, (BATCH * 6000, 3), generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, (x[:, 0] % 2).float())


def train_long(place: Place) -> int:
    trainer = make(
        Long(True), {}, OPTIMIZERS["adagrad"], batch=BATCH, place=place, max_steps=6000, run_dir="runs/long",
        validate_every=None,
    )  # fmt: skip
    trainer.fit()
    return trainer.step


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_no_rank_dies_in_thousands_of_steps(tmp_path) -> None:
    """By torch's own all-reduce of sparse tensors, two of three such runs did not end."""
    assert run_ranks(3, train_long, timeout_s=600) == [6000] * 3


class Weighed(Task):
    """Some micro-batches have weight 0."""

    def weight(self, batch: Any) -> int:
        return 0 if batch[0][0, 0] % 2 else len(batch[0])


def train_weighed(place: Place) -> list[Any]:
    found = []
    for sparse in (False, True):
        trainer = make(
            Weighed(sparse), {}, OPTIMIZERS["sgd"], batch=BATCH, place=place, max_steps=STEPS,
            run_dir=f"runs/{place.world}-{sparse}",
        )  # fmt: skip
        trainer.fit()
        found.append([p.detach().numpy().copy() for p in trainer.parameters])
    return found


def test_a_micro_batch_of_weight_0_has_sparse_gradients_too(tmp_path) -> None:
    for dense, sparse in run_ranks(3, train_weighed):
        assert all(abs(one - other).max() <= 2e-6 for one, other in zip(dense, sparse, strict=True))


def test_a_resume_has_the_bits_of_the_whole_run(tmp_path) -> None:
    def run(steps: int, name: str, **options: Any) -> list[torch.Tensor]:
        optimizer = OPTIMIZERS["adagrad"]
        trainer = make(Task(True), {}, optimizer, batch=BATCH, max_steps=steps, run_dir=f"runs/{name}", **options)
        trainer.fit()
        return [p.detach().clone() for p in trainer.parameters]

    whole = run(4, "whole")
    run(2, "first")
    again = run(4, "again", resume="ckpt/first/last.pt" if (tmp_path / "ckpt/first/last.pt").exists() else "ckpt/first")
    assert all(torch.equal(p, q) for p, q in zip(whole, again, strict=True))


def test_values_of_a_row_are_added_before_they_are_clipped() -> None:
    """Row 1 is used twice: 3 + 3 = 6; row 2 once: 8. The norm is 10."""
    table = nn.Embedding(4, 1, sparse=True)
    (table(torch.tensor([1, 1, 2])) * torch.tensor([[3.0], [3.0], [8.0]])).sum().backward()
    assert clip_gradients([table.weight], None) == 10.0
    assert clip_gradients([table.weight], 5.0) == 10.0
    (values,) = gradients([table.weight])
    assert values.flatten().tolist() == pytest.approx([3, 4])
    clip_values([table.weight], 3.5)
    grad = table.weight.grad
    assert grad is not None and grad.to_dense().flatten().tolist() == pytest.approx([0, 3, 3.5, 0])


CALLBACKS: dict[str, type[Callback]] = {
    "overlap": Overlap, "grad_compress": GradCompress, "shard": Shard, "nan_guard": NanGuard,
    "optimizer_in_backward": OptimizerInBackward,
}  # fmt: skip


def refused(place: Place, name: str) -> str:
    with pytest.raises(ConfigError) as error:
        make(Task(True), {name: CALLBACKS[name]()}, OPTIMIZERS["sgd"], batch=BATCH, place=place, run_dir=f"runs/{name}")
    return str(error.value)


@pytest.mark.parametrize("name", quick(CALLBACKS, 2))
def test_a_callback_that_takes_dense_gradients_is_refused(name: str, tmp_path) -> None:
    (told,) = set(run_ranks(2, refused, name))
    end = "takes dense gradients, and word.weight has sparse ones; leave it out, or sparse=False there"
    assert told == f"callbacks.{name}: {end}"


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (adamw, "optimizer=adamw: takes dense gradients, and word.weight has sparse ones; use adagrad or sgd"),
        (lamb, "optimizer=lamb: takes dense gradients"),
        (sgd, "optimizer.momentum=0.9: takes dense gradients, .*; set optimizer.momentum=0, or sparse=False there"),
        (partial(adagrad, weight_decay=0.1), "optimizer.weight_decay=0.1: takes dense gradients"),
    ],
)
def test_an_optimizer_that_changes_unused_rows_is_refused(optimizer: Any, told: str, tmp_path) -> None:
    with pytest.raises(ConfigError, match=f"^{told}"):
        make(Task(True), {}, optimizer, batch=BATCH)
    make(Task(False), {}, optimizer, batch=BATCH).close()


def test_precision_and_nccl() -> None:
    model = Words(True)
    own = OPTIMIZERS["sgd"](model.parameters())
    with refuses("trainer.precision=fp16", "sparse=False"):
        refuse_sparse(model, own, [], "fp16", False)
    with refuses("trainer.backend=nccl", "sparse=False"):
        refuse_sparse(model, own, [], "fp32", True)
    model.requires_grad_(False)
    refuse_sparse(model, own, ["overlap"], "fp16", True)


class Own(torch.optim.SGD):
    """A user's own optimizer, which may know what to do."""


def test_a_users_own_optimizer_is_trusted() -> None:
    model = Words(True)
    refuse_sparse(model, Own(model.parameters(), lr=0.1, momentum=0.9), [], "fp32", False)
