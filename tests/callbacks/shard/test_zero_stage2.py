"""Stage 2: what a rank holds of the gradients, and what it refuses."""

import gc
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.quick import quick
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.shard.callback import Shard
from trainer.callbacks.shard.zero import ZeRO2
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError
from trainer.optim.factories import adamw
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")

WIDTH = 64
SLACK = 1000  # bytes of biases, and of a flag for each bucket


class Held(Callback):
    """The bytes that this rank holds for gradients after each backward pass, and those of its own parameters."""

    role = Role.MEASURE

    def __init__(self) -> None:
        self.held: list[int] = []
        self.before: list[weakref.ref[Tensor]] = []

    def on_fit_start(self, trainer) -> None:
        trainer.recipe.trainer = trainer
        self.before = list(map(weakref.ref, alive()))  # other tests' too

    def on_before_optimizer_step(self, trainer) -> None:
        looks = [held(trainer, self.before)]
        while isinstance(trainer.strategy, ZeRO2) and looks[-1] > size(trainer.strategy.owners.own) + SLACK:
            if len(looks) == 40:
                break
            time.sleep(0.05)  # a thread of gloo's may be about to let the last bucket go
            looks.append(held(trainer, self.before))
        self.held.append(looks[-1])


def size(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def alive() -> list[Tensor]:
    gc.collect()
    return [t for t in gc.get_objects() if isinstance(t, Tensor)]


def held(trainer: Any, before: list[weakref.ref[Tensor]]) -> int:
    """Count all memory that tensors refer to, but for weights and state, each storage once."""
    if isinstance(trainer.strategy, ZeRO2):
        assert trainer.strategy.background
        trainer.strategy.background.thread.submit(int).result()  # the thread has let the last bucket go
    older = {id(t) for ref in before if (t := ref()) is not None}
    known = {p.untyped_storage().data_ptr() for p in (*trainer.module.parameters(), *trainer.module.buffers())}
    known |= {v.untyped_storage().data_ptr() for state in trainer.optimizer.state.values() for v in state.values()}
    tensors = [*(t for t in alive() if id(t) not in older), *(p.grad for p in trainer.parameters if p.grad is not None)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel() > WIDTH}
    return sum(size for address, size in storages.items() if address not in known)


def fit(place: Place, recipe: Any, callbacks: dict[str, Callback], accumulate: int = 1, **options: Any) -> Trainer:
    trainer = Trainer(
        recipe, callbacks, adamw, batch=12 * accumulate, accumulate=accumulate, place=place,
        data=DataOptions(workers=0),
        options=Options(max_steps=2, run_dir=f"runs/{Path(place.store).parent.name}", **options),
    )  # fmt: skip
    trainer.fit()
    return trainer


class Between(Toy):
    """Notes what is held when a micro-batch begins."""

    trainer: Any = None

    def __init__(self) -> None:
        super().__init__(width=WIDTH, depth=6)
        self.held: list[int] = []

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if self.trainer is not None and model.training:
            self.held.append(sum(p.grad.nbytes for p in self.trainer.parameters if p.grad is not None))
        return super().loss(model, batch)


def count(place: Place, stage: int, accumulate: int) -> tuple[list[int], list[int], int, int]:
    """The bytes after each backward pass, before each micro-batch, of the own parameters, and of all."""
    watch, recipe = Held(), Between()
    trainer = fit(place, recipe, {"held": watch, **({"shard": Shard(2)} if stage else {})}, accumulate)  # pyright: ignore
    own = trainer.strategy.owners.own if isinstance(trainer.strategy, ZeRO2) else trainer.parameters
    return watch.held, recipe.held, size(own), size(trainer.parameters)


@pytest.mark.parametrize("accumulate", quick([1, 3]))
def test_after_backward_a_rank_holds_the_gradients_of_its_own_parameters(accumulate):
    """Until the last micro-batch, they accumulate whole."""
    for after, between, own, total in run_ranks(3, count, 2, accumulate):
        assert own < 0.4 * total
        assert max(after) <= own + SLACK and min(after) > own - SLACK, after
        assert between == [0, *[total] * (accumulate - 1)] * 2
    for after, _, _, total in run_ranks(3, count, 0, accumulate):
        assert min(after) >= 0.95 * total  # biases are not counted, as activations are as small


class Unused(Toy):
    """A parameter that no loss uses."""

    def model(self) -> nn.Module:
        model = super().model()
        model.idle = nn.Parameter(torch.ones(3))
        self.made = model
        return model


class Often(Toy):
    """Its blocks are one block, recomputed in backward passes inside the backward pass."""

    def model(self) -> nn.Module:
        self.made = super().model()
        return self.made

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x, net = batch["x"], dict(model.named_children())
        x = net["first"](x)
        for _ in range(2):
            x = checkpoint(next(net["blocks"].children()), x, use_reentrant=True)
        assert isinstance(x, Tensor)
        loss = (net["last"](x) - batch["y"]).square().mean()
        return loss + 0 * sum(p.sum() for p in net["blocks"].parameters())


class Few(Toy):
    def model(self) -> nn.Module:
        self.made = nn.Linear(8, 4)
        return self.made


def refused(place: Place, recipe: Any, precision: str = "fp32") -> str:
    try:
        fit(place, recipe, {"shard": Shard(2)}, precision=precision, timeout_s=20.0)
    except ConfigError as error:
        assert not any(p._post_accumulate_grad_hooks for p in recipe.made.parameters())
        return str(error)
    return ""


def test_a_parameter_without_a_gradient_is_named():
    for told in run_ranks(3, refused, Unused()):
        assert told.startswith("shard: no gradient for idle in the last micro-batch of a step; use every parameter")
        assert told.endswith("set callbacks.shard.stage=1 with trainer.ddp.find_unused_parameters=true")


def test_a_parameter_with_two_gradients_is_named():
    for told in run_ranks(3, refused, Often()):
        assert told.startswith("shard: blocks.0.0.") and "has two gradients in one backward pass" in told


def test_fp16_needs_a_gradient_on_each_rank():
    for told in run_ranks(3, refused, Few(), "fp16"):
        assert told.startswith("callbacks.shard.stage=2: 2 parameters for 3 ranks leave one without")
    assert run_ranks(3, refused, Few()) == [""] * 3


def hooks_left(place: Place) -> int:
    trainer = fit(place, Toy(), {"shard": Shard(2)})
    trainer.module.train()
    trainer.recipe.loss(trainer.module, {k: torch.ones(2, n) for k, n in (("x", 8), ("y", 4), ("mask", 4))}).backward()
    assert all(p.grad is not None for p in trainer.parameters)
    return len(trainer.module._forward_pre_hooks) + sum(bool(p._post_accumulate_grad_hooks) for p in trainer.parameters)


def test_no_hook_stays():
    assert run_ranks(3, hooks_left) == [0] * 3
