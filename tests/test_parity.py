"""Plain is plain: without callbacks, `Trainer` computes bit for bit what a bare DDP loop computes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.quick import quick
from support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy_recipe import Toy

from trainer.config.options import Options
from trainer.optim.groups import parameter_groups
from trainer.process.environment import Place
from trainer.trainer import Trainer

STEPS, BATCH = 20, 12
MOST = 0.1  # of the norm, or of an element


class Batches(Toy):
    """The toy model on an iterable of this rank's batches, so that the bare loop sees the same ones."""

    def __init__(self, rank: int, world: int, accumulate: int, width: int = 64) -> None:
        super().__init__(width=width, depth=2)
        self.rank, self.world, self.accumulate = rank, world, accumulate

    def data(self, split: str):
        if split == "val":
            return None
        generator = torch.Generator().manual_seed(self.rank)
        size = BATCH // self.world // self.accumulate
        return [
            (torch.randn(size, 8, generator=generator), torch.randn(size, 4, generator=generator))
            for _ in range(STEPS * self.accumulate)
        ]

    def weight(self, batch) -> int:
        return len(batch[0])

    def loss(self, model: nn.Module, batch) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x).float(), y)


def adam(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def bare_loop(place: Place, accumulate: int, clip: str | None, bf16: bool, width: int) -> list[torch.Tensor]:
    if place.world > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(place.store, place.world), rank=place.rank, world_size=place.world
        )
    recipe = Batches(place.rank, place.world, accumulate, width)
    torch.manual_seed(0)
    module = recipe.model()
    model = DDP(module) if place.world > 1 else module
    optimizer = adam(parameter_groups(module))
    batches = iter(recipe.data("train"))
    for _ in range(
        2 if place.world > 1 else 0
    ):  # DDP lays out its buckets after its first pass, and a layout is an order of summation
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = recipe.loss(model, recipe.data("train")[0])
        loss.backward()
        optimizer.zero_grad()
    for _ in range(STEPS):
        for micro in range(accumulate):
            if place.world > 1:
                model.require_backward_grad_sync = micro == accumulate - 1
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = recipe.loss(model, next(batches))
            (loss / accumulate).backward()
        if clip == "clip_norm":
            nn.utils.clip_grad_norm_(module.parameters(), MOST)
        elif clip == "clip_value":
            nn.utils.clip_grad_value_(module.parameters(), MOST)
        optimizer.step()
        optimizer.zero_grad()
    if place.world > 1:
        del model  # DDP's reducer must not be the last to hold the group: see Trainer.close
        dist.destroy_process_group()
    return [p.detach().numpy() for p in module.parameters()]


def ours(place: Place, accumulate: int, clip: str | None, bf16: bool, width: int) -> list[torch.Tensor]:
    clips = {clip: MOST} if clip else {}
    options = Options(max_steps=STEPS, precision="bf16" if bf16 else "fp32", **clips)
    recipe = Batches(place.rank, place.world, accumulate, width)
    trainer = Trainer(recipe, optimizer=adam, batch=BATCH, accumulate=accumulate, options=options, place=place)
    trainer.fit()
    return [p.detach().numpy() for p in trainer.module.parameters()]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.slow), "clip_norm"])
@pytest.mark.parametrize("accumulate", quick([1, 2]))
@pytest.mark.parametrize("world", [1, 3])
def test_trainer_equals_a_bare_loop_bitwise(world, accumulate, clip, bf16, tmp_path):
    compare(world, accumulate, clip, bf16, 64)


def test_also_with_gradients_clipped_by_value(tmp_path):
    compare(3, 2, "clip_value", False, 64)


def test_also_when_there_are_several_buckets(tmp_path):
    compare(3, 1, None, False, 512)  # 2 MiB: DDP's first bucket holds 1


def compare(world: int, *setting: Any) -> None:
    bare = run_ranks(world, bare_loop, *setting)
    trained = run_ranks(world, ours, *setting)
    for rank in range(world):
        assert all((a == b).all() for a, b in zip(bare[rank], trained[rank], strict=True))
    start = Batches(0, world, setting[0], setting[-1]).model()
    assert not torch.equal(torch.from_numpy(trained[0][0]), next(start.parameters()))
