"""A model that is built on the meta device: first values by `reset_parameters`, in rows on each rank, or one line."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from support.runs import sgd
from support.sharded import flat
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.ema import EMA
from trainer.callbacks.shard.callback import Shard
from trainer.checkpoint.pretrained import load_weights
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError
from trainer.parallel import meta
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")

CPU = torch.device("cpu")


class Scale(nn.Module):
    """A parameter on the meta device beside a buffer that has memory and is no initial value of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))
        self.register_buffer("table", torch.linspace(0.5, 1.5, width, device=CPU))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale, 1.0, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.table


class Empty(Toy):
    """Without memory: linear layers, statistics, a weight under two names, and a table that has memory."""

    def model(self) -> nn.Module:
        with torch.device("meta"):
            net = super().model()
            net.add_module(
                "first",
                nn.Sequential(net.get_submodule("first"), nn.BatchNorm1d(self.width), Scale(self.width)),
            )
            net.tied = nn.Linear(8, self.width, bias=False)
            net.tied.weight = net.first[0].weight  # pyright: ignore
        return net


class ByHand(Empty):
    """The same first values, of whole modules."""

    def model(self) -> nn.Module:
        table = torch.linspace(0.5, 1.5, self.width)
        net = super().model().to_empty(device="cpu")
        net.tied.weight = net.first[0].weight  # pyright: ignore
        for module in net.modules():
            if hasattr(module, "reset_parameters") and module is not net.tied:
                module.reset_parameters()  # pyright: ignore
            elif module is net.tied:
                nn.Linear(8, self.width, bias=False)  # draws as many random numbers
        net.first[2].table.copy_(table)  # pyright: ignore
        return net


class Start(Callback):
    def on_fit_start(self, trainer) -> None:
        self.start = flat(trainer.module)

    def on_fit_end(self, trainer) -> None:
        self.end = flat(trainer.module, buffers=False)


def train(place: Place, cases: list[tuple[Any, dict[str, Any] | None]], **options: Any) -> list[tuple[Any, Any]]:
    found = []
    for i, (recipe, knobs) in enumerate(cases):
        start = Start()
        Trainer(
            recipe, {"start": start, **({} if knobs is None else {"shard": Shard(3, **knobs), "ema": EMA(0.5)})}, sgd,
            batch=24, data=DataOptions(workers=0), place=replace(place, store=f"{place.store}-{i}"),
            options=Options(
                max_steps=3, run_dir=f"runs/{place.world}-{i}", timeout_s=30.0,
                checkpoint=CheckpointOptions(every_steps=None),
                **options,
            ),
        ).fit()  # fmt: skip
        found.append((start.start, start.end))
    return found


@pytest.mark.slow
def test_rows_have_the_first_values_of_whole_modules():
    """To the bits, on any number of ranks; the run is then DDP's to rounding."""
    cases = [(ByHand(width=9), None), (Empty(width=9), {}), (Empty(width=9), {"hybrid": 2, "offload": True})]
    for world in (3, 4):
        for (start, end), *sharded in run_ranks(world, train, cases if world == 4 else cases[:2]):
            for own_start, own_end in sharded:
                np.testing.assert_array_equal(own_start, start)
                np.testing.assert_allclose(own_end, end, rtol=0, atol=1e-6)  # float32, a few steps of SGD
            assert np.abs(start[: len(end)] - end).max() > 1e-3


def test_one_module_at_a_time_has_memory(monkeypatch):
    """And none has after it."""
    source, model, held = Empty(width=9).model(), ByHand(width=9).model(), []
    real = meta.fill

    def fill(module: nn.Module, device: torch.device) -> bool:
        held.append(sum(t.nbytes for t in (*source.parameters(), *source.buffers()) if not t.is_meta))
        return real(module, device)

    monkeypatch.setattr(meta, "fill", fill)
    meta.initialise(model, source, CPU)
    assert len(held) > 5 and max(held) == 9 * 4  # the table
    assert all(p.is_meta for p in source.parameters())
    assert all(math.isfinite(p.sum().item()) for p in model.parameters())


class NoReset(Empty):
    def model(self) -> nn.Module:
        net = super().model()
        net.own = nn.Parameter(torch.empty(3, device="meta"))
        return net


def refused(place: Place, recipe: Any, knobs: dict[str, Any] | None) -> str:
    try:
        train(place, [(recipe, knobs)])
    except ConfigError as error:
        return str(error)
    return ""


def test_what_can_not_get_values_is_refused_by_name():
    for told in run_ranks(3, refused, NoReset(), {}):
        assert told == (
            "recipe.model(): the model is on the meta device, and Net has no reset_parameters() to give own its first "
            "value; define it, or build the model on the CPU"
        )
    for told in (refused(Place(), Empty(), None), *run_ranks(3, refused, Empty(), None)):
        assert told.startswith("recipe.model(): first.0.weight is on the meta device, and so are ")
        assert told.endswith("build the model on the CPU, or use callbacks.shard.stage=3 on several ranks")


def test_a_new_model_takes_saved_weights(tmp_path):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    saved = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict()
    torch.save(saved, tmp_path / "saved.pt")
    load_weights(meta.on_host(model), str(tmp_path / "saved.pt"))
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
