"""The average by hand; with deferred steps the same bits; it is what validation and export see."""

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.ema import EMA
from trainer.callbacks.overlap.callback import Overlap
from trainer.config.options import DataOptions, DDPOptions, Options
from trainer.log import log
from trainer.process.environment import Place
from trainer.trainer import Trainer


class Normed(Toy):
    """With buffers: running statistics and a count."""

    def model(self) -> nn.Module:
        net = super().model()
        net.add_module("first", nn.Sequential(net.get_submodule("first"), nn.BatchNorm1d(self.width)).to(self.dtype))
        return net


class History(Callback):
    """Weights and averages after each step, and before the first."""

    def __init__(self) -> None:
        self.weights: list[np.ndarray] = []

    def on_fit_start(self, trainer) -> None:
        self.on_step_end(trainer)

    def on_step_end(self, trainer) -> None:
        self.weights.append(flat(trainer.module))


def flat(module: nn.Module) -> np.ndarray:
    return np.concatenate([p.detach().numpy().ravel().copy() for p in module.parameters()])


def train(recipe: Toy, place: Place, decay: float, steps: int, **callbacks: Callback) -> Trainer:
    trainer = Trainer(
        recipe,
        {"ema": EMA(decay), **callbacks},
        batch=12,
        options=Options(max_steps=steps, ddp=DDPOptions(bucket_mib=0.004)),
        data=DataOptions(workers=0),
        place=place,
        name=f"run-{len(callbacks)}",
    )
    trainer.fit()
    return trainer


def test_three_steps_by_hand(tmp_path):
    history = History()
    trainer = train(Normed(dtype="float64"), Place(), 0.9, 3, history=history)
    w0, w1, w2, w3 = history.weights
    average = 0.9**3 * w0 + 0.1 * (0.9**2 * w1 + 0.9 * w2 + w3)
    np.testing.assert_allclose(flat(trainer.eval_model), average, rtol=1e-12)
    np.testing.assert_array_equal(flat(trainer.module), w3)
    assert not any(p.requires_grad for p in trainer.eval_model.parameters())


def test_buffers_are_copied(tmp_path):
    trainer = train(Normed(), Place(), 0.9, 3)
    buffers = dict(trainer.module.named_buffers())
    assert int(buffers["first.1.num_batches_tracked"]) == 3
    assert len(buffers) == 3
    for name, buffer in trainer.eval_model.named_buffers():
        assert torch.equal(buffer, buffers[name]) and buffer is not buffers[name]


def test_validation_is_of_the_average(tmp_path):
    """Also where blocks are recomputed: the copy's blocks must use the copy's weights."""
    recipe = Toy(dtype="float64")
    for extra in ({}, {"activation_checkpoint": ActivationCheckpoint()}):
        trainer = train(recipe, Place(), 0.9, 5, **extra)
        points = recipe.data("val")
        batch = {key: torch.stack([points[i][key] for i in range(13)]) for key in ("x", "y", "mask")}
        losses = []
        for module in (trainer.eval_model, trainer.module):
            model = recipe.model()
            model.load_state_dict(module.state_dict())
            losses.append(recipe.loss(model, batch).item())
        np.testing.assert_allclose(trainer.validation["val/loss"], losses[0], rtol=1e-12)
        assert abs(losses[0] - losses[1]) > 1e-4


def averages(place: Place, overlapped: bool) -> tuple[bytes, bytes, dict[str, float]]:
    extra = {"overlap": Overlap()} if overlapped else {}
    trainer = train(Toy(width=32), place, 0.8, 6, **extra)
    return flat(trainer.eval_model).tobytes(), flat(trainer.module).tobytes(), trainer.validation


def test_with_deferred_steps_the_average_has_the_same_bits(tmp_path):
    plain, deferred = run_ranks(3, averages, False), run_ranks(3, averages, True)
    assert plain == deferred
    assert plain[0][0] != plain[0][1]


@pytest.mark.parametrize(("decay", "steps", "fits"), [(0.999, 130, "0.923"), (0.5, 19, "0.473"), (0.9, 5, "0")])
def test_a_short_run_is_warned_of_with_a_decay_that_fits(decay, steps, fits, caplog, monkeypatch):
    monkeypatch.setattr(log, "propagate", True)
    EMA(decay)._warn(steps)
    (text,) = caplog.messages
    assert text.startswith(f"callbacks.ema.decay={decay}: averages over about {1 / (1 - decay):.0f} steps")
    assert text.endswith(f"so validation sees weights of its beginning; give callbacks.ema.decay={fits}")
    caplog.clear()
    EMA(float(fits))._warn(steps)
    assert len(caplog.messages) == 0


@pytest.mark.parametrize(("decay", "steps"), [(0.999, 10_000), (0.5, 20), (0.0, 1), (0.999, None)])
def test_a_long_run_is_not_warned_of(decay, steps, caplog, monkeypatch):
    monkeypatch.setattr(log, "propagate", True)
    EMA(decay)._warn(steps)
    assert not caplog.messages
