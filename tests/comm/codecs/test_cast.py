"""Casts to 16 bits: the stated bound, which is not far from the truth, and what is not finite."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

from trainer.callbacks.grad_compress import GradCompress
from trainer.comm.bucket import Bucket
from trainer.comm.ranks import Ranks
from trainer.comm.reduce import AllReduce
from trainer.config.options import Options
from trainer.process.environment import Place

HOOKS = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}


def reduced(place: Place, codec: str, scale: float, poison: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The chain on numbers of many magnitudes: what comes out, the mean, and the mean of magnitudes."""
    ranks = Ranks(place, "cpu", "gloo", 60.0)
    trainer: Any = SimpleNamespace(
        world=place.world, rank=place.rank, options=Options(), module=nn.Linear(1, 1), rehearsing=False
    )
    reduce = GradCompress(codec).wrap_reduce(trainer, AllReduce(ranks.new_group()))
    generator = torch.Generator().manual_seed(place.rank)
    mine = torch.randn(50_000, generator=generator) * 10 ** torch.empty(50_000).uniform_(-2, 3, generator=generator)
    mine *= scale
    if place.rank == 1:
        mine[7] = poison
    everyone = [torch.empty_like(mine) for _ in range(place.world)]
    dist.all_gather(everyone, mine)
    mean = reduce(mine, Bucket.of([mine], 0))
    assert mean.dtype == torch.float32
    ranks.close()
    exact = torch.stack(everyone).double()
    return mean.double().numpy(), exact.mean(0).numpy(), exact.abs().mean(0).numpy()


@pytest.mark.parametrize(
    ("codec", "unit", "scale"), [("bf16", 2**-8, 1.0), ("fp16", 2**-11, 1.0), ("fp16", 2**-11, 1e9)]
)
def test_the_stated_bound(codec, unit, scale):
    """Each element to (world + 1) roundings of the mean absolute value; and not ten times better than that. fp16 also
    where a loss scale has made gradients a million times what fp16 can hold."""
    for mean, exact, size in run_ranks(3, reduced, codec, scale, 1.0):
        error = np.abs(mean - exact) / size
        assert 4 * unit / 10 < error.max() <= 4 * unit * (1 + unit) ** 4


@pytest.mark.parametrize("codec", HOOKS)
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(codec, poison):
    """A loss scaler looks for it in the reduced gradients."""
    for mean, _, _ in run_ranks(3, reduced, codec, 1.0, poison):
        assert not np.isfinite(mean[7])
