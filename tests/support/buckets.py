"""A stack of equal layers, and what of it is reduced at a time: for tests of the layout of gradients."""

from typing import Any

import torch
from torch import nn
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.bucket.callback import Bucket
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.local_sgd.callback import LocalSGD
from trainer.callbacks.overlap.callback import Overlap
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.optim.factories import sgd
from trainer.process.environment import Place
from trainer.trainer import Trainer

LAYERS = 8  # of 4 KiB of weights each, and nothing else
KIB = 1 / 1024


class Stack(Toy):
    tied = skip = False

    def model(self) -> nn.Module:
        model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(LAYERS)])
        if self.tied:
            model.append(nn.Linear(32, 32, bias=False))
            model[-1].weight = model[0].weight
        return model

    def weight(self, batch: dict[str, torch.Tensor]) -> int:
        return len(batch["x"])

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
        self.buckets = len(trainer.strategy.buckets())


WITH = {
    "nothing": dict,
    "overlap": lambda: {"overlap": Overlap()},
    "grad_compress": lambda: {"grad_compress": GradCompress("bf16")},
    "local_sgd": lambda: {"local_sgd": LocalSGD(every=2, warmup_steps=1)},
}


def fit(
    place: Place, callbacks: dict[str, Callback], recipe: type[Stack] = Stack, steps: int = 2, name: str = "run",
    resume: str | None = None, accumulate: int = 2, **ddp: Any,
) -> dict[str, torch.Tensor]:  # fmt: skip
    trainer = Trainer(
        recipe(), callbacks, sgd, batch=12, accumulate=accumulate,
        options=Options(
            max_steps=steps, run_dir=f"runs/{name}", resume=resume, ddp=DDPOptions(**ddp), log_every_steps=1,
            checkpoint=CheckpointOptions(dir=f"checkpoints/{name}", every_steps=2, keep=9),
        ),
        data=DataOptions(workers=0), place=place,
    )  # fmt: skip
    trainer.fit()
    return {name: value.clone() for name, value in trainer.module.state_dict().items()}


def reductions(place: Place, knobs: dict[str, Any], recipe: type[Stack] = Stack) -> tuple[list[tuple[int, int]], int]:
    count = Count()
    fit(place, {"bucket": Bucket(**knobs), "count": count}, recipe, bucket_mib=50.0)
    return count.calls, count.buckets


def weights(place: Place, name: str, knobs: dict[str, Any] | None, with_: str = "nothing") -> dict[str, torch.Tensor]:
    """After three steps; knobs None: without the callback."""
    own = {} if knobs is None else {"bucket": Bucket(**knobs)}
    return fit(place, own | WITH[with_](), Stack, 3, name)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], value) for name, value in other.items())
