"""Late parameters are reduced together after all others, are those that were named, and have their own residuals."""

from typing import Any

import pytest
import torch
from support.buckets import KIB, Stack, equal, fit, reductions, weights
from support.quick import quick
from support.ranks import run_ranks
from torch import nn

from trainer.callbacks.bucket.callback import Bucket
from trainer.callbacks.grad_compress import GradCompress
from trainer.errors import ConfigError
from trainer.process.environment import Place

pytestmark = pytest.mark.usefixtures("tmp_path")


class Tied(Stack):
    """The last layer has the first one's weight."""

    tied = True


class Side(Stack):
    """Has a weight that no loss uses."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_parameter("unused", nn.Parameter(torch.ones(3)))
        return model


class Root(Stack):
    """Has a weight of its own, outside of all layers."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_parameter("scale", nn.Parameter(torch.ones(4)))
        return model

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        scale = getattr(model, "module", model).scale
        return (model(batch["x"].repeat(1, 4))[:, :4] * scale - batch["y"]).square().mean()


class Sometimes(Root):
    """The first of two micro-batches uses it."""

    calls = 0

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += model.training
        return super().loss(model, batch) if self.calls % 2 else Stack.loss(self, model, batch)


@pytest.mark.parametrize(
    ("late", "recipe", "layers"),
    quick(
        [
            (["0.*", "3.weight"], Stack, [3, 3, 2]),
            (["[1-7].weight"], Stack, [1, 7]),
            (["8.weight"], Tied, [3, 3, 1, 1]),  # by its second name
        ]
    ),
)
def test_late_ones_are_reduced_together_after_all_others(late, recipe, layers):
    for calls, number in run_ranks(3, reductions, {"mib": 12 * KIB, "delayed": late}, recipe):
        assert calls == [(step, n * 1024) for step in range(2) for n in layers]
        assert number == len(layers) - 1


@pytest.mark.parametrize("with_", ["grad_compress", "local_sgd"])
def test_late_goes_with(with_):
    """All ranks end alike; where the codec is local to the late ones or the ranks part, nothing hangs."""
    first, *others = run_ranks(3, weights, "run", {"delayed": ["2.*", "7.*"]}, with_)
    assert all(equal(first, other) for other in others)


def with_residuals(place: Place, name: str, resume: str | None) -> dict[str, torch.Tensor]:
    callbacks = {"bucket": Bucket(12 * KIB, delayed=["0.*"]), "grad_compress": GradCompress("topk", density=0.3)}
    return fit(place, callbacks, steps=4, name=name, resume=resume)


def test_what_was_kept_back_of_each_is_its_own_after_a_resume():
    """DDP counts its own parameters, without the late ones."""
    straight = run_ranks(3, with_residuals, "straight", None)
    resumed = run_ranks(3, with_residuals, "resumed", "checkpoints/straight/straight/step-00000002")
    assert all(equal(one, other) for one, other in zip(straight, resumed, strict=True))


def test_one_of_the_root_module_is_reduced_once():
    for calls, _ in run_ranks(3, reductions, {"delayed": ["scale"]}, Root):
        assert calls == [(step, n) for step in range(2) for n in (8 * 1024, 4)]


def unused(place: Place, recipe: type[Stack], late: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        fit(place, {"bucket": Bucket(delayed=late)}, recipe)
    return str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "late", "named"),
    [(Side, ["unused", "7.*"], "unused"), (Side, ["unused"], "unused"), (Sometimes, ["scale"], "scale")],
)
def test_late_ones_that_no_loss_uses_are_an_error(recipe, late, named):
    for told in run_ranks(2, unused, recipe, late):
        assert told.startswith(
            f"bucket: no gradient for {named} in the last micro-batch of a step; use every parameter"
        )


def refused(place: Place, knobs: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        fit(place, {"bucket": Bucket(**knobs)})
    return str(caught.value)


@pytest.mark.parametrize(
    ("delayed", "message"),
    [
        ("7.weihgt", "delayed=7.weihgt: no trainable parameter has this name; did you mean 7.weight or"),
        ("*", "delayed=['*']: names all trainable parameters; leave some to DDP"),
    ],
)
def test_delayed_names_some_parameters(delayed, message):
    for found in run_ranks(2, refused, {"delayed": [delayed]}):
        assert found.startswith(f"callbacks.bucket.{message}")
