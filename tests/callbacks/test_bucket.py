"""The number of reductions a step follows from the bucket's size."""

import pytest
import torch
from ranks import run_ranks
from torch import nn
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.bucket import Bucket
from trainer.checkpoint.resume import buckets
from trainer.errors import ConfigError
from trainer.launch import Place
from trainer.options import DataOptions, DDPOptions, Options
from trainer.trainer import Trainer

LAYERS = 8  # of 4 KiB of weights each, and nothing else


class Stack(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(LAYERS)])

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (model(batch["x"].repeat(1, 4))[:, :4] - batch["y"]).square().mean()


class Count(Callback):
    """How many elements are reduced at a time, by step; and the number of DDP's buckets."""

    role = Role.COMPRESS

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def wrap_reduce(self, trainer, reduce):
        def counted(flat, bucket):
            if not trainer.rehearsing:
                self.calls.append((trainer.step, flat.numel()))
            return reduce(flat, bucket)

        return counted

    def on_fit_end(self, trainer) -> None:
        self.buckets = len(buckets(trainer.model))


def reductions(place: Place, mib: float) -> tuple[list[tuple[int, int]], int]:
    count = Count()
    trainer = Trainer(
        Stack(),
        {"bucket": Bucket(mib), "count": count},
        batch=12,
        accumulate=2,
        options=Options(max_steps=2, ddp=DDPOptions(bucket_mib=50.0)),
        data=DataOptions(workers=0),
        place=place,
    )
    trainer.fit()
    return count.calls, count.buckets


@pytest.mark.parametrize(("kib", "layers"), [(4, 1), (8, 2), (12, 3), (16, 4), (32, 8), (25 * 1024, 8)])
def test_reductions_per_step(kib, layers, tmp_path, monkeypatch):
    """With accumulation too, each bucket is reduced once a step."""
    monkeypatch.chdir(tmp_path)
    sizes = [layers * 1024] * (LAYERS // layers) + [LAYERS % layers * 1024] * (LAYERS % layers > 0)
    for calls, number in run_ranks(2, reductions, kib / 1024):
        assert calls == [(step, size) for step in range(2) for size in sizes]
        assert number == len(sizes)


def test_the_size_must_be_positive():
    with pytest.raises(ConfigError, match=r"callbacks\.bucket\.mib=0: must be more than 0"):
        Bucket(0)
