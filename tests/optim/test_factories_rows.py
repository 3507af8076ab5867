"""Optimizers on rows, as stage 3 of shard lays parameters out: the numbers of whole ones, or refused by name."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.sharded import Case, fit
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard as Sliced
from torch.distributed.tensor import distribute_tensor
from toy_recipe import Toy

from trainer.callbacks.shard.callback import Shard
from trainer.comm.mesh import forget_groups
from trainer.optim.factories import adafactor, adamw8bit, lamb, lars
from trainer.optim.muon import Muon
from trainer.process.environment import Place

WORLD, STEPS = 3, 6
SHAPES = ((17, 9), (2, 17), (9, 9), (5,))  # matrices with fewer rows than ranks, and with more rows than columns
BOUNDS = {"lamb": 1e-6, "lars": 1e-6, "muon": 0.0}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "lamb": partial(lamb, lr=0.05),
    "lars": partial(lars, lr=0.01, trust_coefficient=1.0),
    "muon": partial(Muon, lr=0.03),
}
REFUSED = {
    "adafactor": (adafactor, "its moments are sums over whole matrices"),
    "adamw8bit": (adamw8bit, "its blocks of 256 values are of whole parameters"),
}


def groups(name: str, params: list[nn.Parameter]) -> list[dict[str, Any]]:
    kinds: list[dict[str, Any]] = [{}, {"weight_decay": 0.0}]
    if name == "muon":
        kinds = [{"hidden": True}, {"hidden": False, "weight_decay": 0.0}]
    return [{"params": params[:-1], **kinds[0]}, {"params": params[-1:], **kinds[1]}]


def distances(place: Place) -> dict[tuple[str, bool], float]:
    """Between whole parameters and rows or columns of them, which get the same gradients."""
    dist.init_process_group("gloo", store=dist.FileStore(place.store, WORLD), rank=place.rank, world_size=WORLD)
    mesh, found = DeviceMesh("cpu", list(range(WORLD))), {}
    for (name, make), last in product(OPTIMIZERS.items(), (False, True)):
        torch.manual_seed(0)
        start = [torch.randn(shape) for shape in SHAPES]
        whole = [nn.Parameter(tensor.clone()) for tensor in start]
        cuts = [[Sliced((tensor.dim() - 1) * last)] for tensor in start]
        slices = [nn.Parameter(distribute_tensor(t, mesh, cut)) for t, cut in zip(start, cuts, strict=True)]
        optimizers = [make(groups(name, params)) for params in (whole, slices)]
        for _ in range(4):
            for one, other, cut in zip(whole, slices, cuts, strict=True):
                one.grad = torch.randn(one.shape)
                other.grad = distribute_tensor(one.grad, mesh, cut)  # pyright: ignore[reportAttributeAccessIssue]
            for optimizer in optimizers:
                optimizer.step()
        gathered = [p.full_tensor() for p in slices]  # pyright: ignore[reportAttributeAccessIssue]
        found[name, last] = max((one - other).abs().max().item() for one, other in zip(whole, gathered, strict=True))
        assert min((one - first).abs().max() for one, first in zip(whole, start, strict=True)) > 1e-3  # all have moved
    forget_groups(mesh)
    dist.destroy_process_group()
    return found


def test_rows_and_columns_are_stepped_as_whole_parameters():
    for found in run_ranks(WORLD, distances):
        assert len(found) == 6 and all(found[name, last] <= BOUNDS[name] for name, last in found), found


def case(name: str, run: str, resume: str | None = None) -> Case:
    options = {"resume": f"ckpt/{name}/step-00000003"} if resume else {}
    make = OPTIMIZERS.get(name) or REFUSED[name][0]
    return Case({"shard": Shard(3)}, options, Toy(width=17, depth=2), make, steps=STEPS, run=run)


def train_all(place: Place) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for name in (*OPTIMIZERS, *REFUSED):
        cases = [case(name, name)] + [case(name, f"{name}-on", name)] * (name in OPTIMIZERS)
        found[name] = fit(replace(place, store=f"{place.store}-{name}"), cases)
    return found


@pytest.mark.slow
def test_runs_on_rows_resume_bit_for_bit_or_are_refused_before_the_first_step(tmp_path):
    for rank in run_ranks(WORLD, train_all, timeout_s=200):
        for name in OPTIMIZERS:
            straight, again = rank[name]
            assert "refused" not in {*straight, *again}, (straight, again)
            assert (straight["weights"] == again["weights"]).all() and straight["losses"][3:] == again["losses"]
            assert straight["losses"][-1] < 0.9 * straight["losses"][0]
        for name, (_, why) in REFUSED.items():
            (refused,) = rank[name]
            told = f"ConfigError: optimizer={name}: {why}, and callbacks.shard.stage=3 gives each rank rows of them;"
            assert refused["refused"] == f"{told} use callbacks.shard.stage=2, or optimizer=adamw"
            assert "losses" not in refused
