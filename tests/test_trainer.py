"""What `Trainer` promises to who calls it from Python, and to recipes and callbacks that are unlike the usual."""

import copy
import json
import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.messages import refuses
from support.ranks import run_ranks
from torch import nn
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError, NumericsError
from trainer.process.environment import Place
from trainer.process.heartbeat import Heartbeat
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")

SHORT = Options(max_steps=2)


def make(recipe: Any, callbacks: dict[str, Callback] | None = None, options: Options = SHORT, **more: Any) -> Trainer:
    return Trainer(
        recipe,
        callbacks,
        batch=12,
        options=options,
        data=DataOptions(workers=0, shuffle_shards=5, shuffle_window=4),
        **more,
    )


@pytest.mark.parametrize(
    "wish, way_out", [({"devices": 2}, r"for launch\(FUNCTION, devices=2\)"), ({"nodes": 2}, "use torchrun or srun")]
)
def test_devices_that_nobody_starts_are_refused(wish, way_out):
    with pytest.raises(ConfigError, match=f"a Trainer made in Python starts no other ranks; .*{way_out}"):
        make(Toy(), options=replace(SHORT, **wish), place=Place())


def test_every_callback_ends_though_one_raises():
    ended = []

    class Ends(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_fit_end(self, trainer) -> None:
            ended.append(self.name)
            raise RuntimeError(f"{self.name} raised")

    with pytest.raises(RuntimeError, match="b raised"):
        make(Toy(), {"a": Ends("a"), "b": Ends("b")}).fit()
    assert ended == ["a", "b"]


def test_an_error_is_reported_before_any_clean_up():
    """That may wait for a device which never answers, or for peers."""
    order: list[str] = []

    class Fails(Callback):
        def on_step_end(self, trainer) -> None:
            raise RuntimeError("trouble")

        def on_fit_end(self, trainer) -> None:
            order.append("clean-up")

    trainer = make(Toy(), {"fails": Fails()})
    trainer.command.on_error = lambda error: order.append(str(error))
    with pytest.raises(RuntimeError, match="trouble"):
        trainer.fit()
    assert order == ["trouble", "clean-up"]


def test_a_hook_for_errors_that_fails_hides_no_error_and_no_report():
    class Fails(Callback):
        def on_step_end(self, trainer) -> None:
            raise RuntimeError("trouble")

        def on_error(self, trainer, error: BaseException) -> None:
            raise ValueError("of the hook")

    reported: list[str] = []
    trainer = make(Toy(), {"fails": Fails()})
    trainer.command.on_error = lambda error: reported.append(str(error))
    with pytest.raises(RuntimeError, match=r"^trouble"):
        trainer.fit()
    assert reported == ["trouble"] and "trouble" in (trainer.run_dir / "summary.json").read_text()


def test_one_graph_is_kept_from_a_step_to_the_next():
    """The next forward pass uses the last one's leaves again; others would hold memory of the host."""
    graphs: list[list[bool]] = []

    class Watch(Callback):
        def on_step_end(self, trainer) -> None:
            graphs.append([loss.grad_fn is not None for loss in trainer.losses])

    make(Toy(), {"watch": Watch()}, accumulate=3).fit()
    assert graphs == [[False, False, True]] * 2


def still(place: Place) -> bool:
    """Whether a rank that has not moved for too long notes its last collectives."""
    seen: list[Any] = []

    class Still(Callback):
        def on_step_end(self, trainer) -> None:
            seen.pop()()
            file = trainer.run_dir / "logs" / f"collectives-rank{place.rank}.json"
            noted.append(bool(json.loads(file.read_text())["entries"]))

    noted = list[bool]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Heartbeat, "watch", lambda self, still_s, on_still, log: seen.append(on_still))
        make(Toy(), {"still": Still()}, options=Options(max_steps=1), place=place).fit()
    return noted == [True]


def test_a_rank_that_is_still_notes_its_collectives():
    assert run_ranks(2, still) == [True, True]


class Loaded(Toy):
    """As `from_pretrained` gives it: in evaluation mode."""

    def model(self) -> nn.Module:
        return super().model().eval()


class PartlyFrozen(Toy):
    def model(self) -> nn.Module:
        model = super().model()
        model.first.eval()
        return model


def test_a_model_that_arrives_in_evaluation_mode_is_trained_in_training_mode():
    trainer = make(Loaded(dropout=0.5))
    trainer.fit()
    assert all(module.training for module in trainer.module.modules())
    trainer = make(PartlyFrozen())
    trainer.fit()
    assert trainer.module.training and not trainer.module.first.training


class Normed(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])


class Notes(Callback):
    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        self.buffers = [buffer.numpy().copy() for buffer in trainer.eval_model.buffers()]


def buffers_at_validation(place: Place) -> list[np.ndarray]:
    notes = Notes()
    make(Normed(), {"notes": notes}, place=place).fit()
    return notes.buffers


def test_all_ranks_validate_with_the_running_statistics_of_rank_0():
    first, *others = run_ranks(3, buffers_at_validation)
    assert len(first) == 3 and np.abs(first[0]).max() > 0
    for other in others:
        assert all((a == b).all() for a, b in zip(first, other, strict=True))


def ddp_has_gone(place: Place) -> bool:
    trainer = make(Toy(), {}, place=place)
    wrapped = trainer.strategy.model is not trainer.module
    trainer.fit()
    return wrapped and trainer.strategy.model is trainer.module


def test_ddp_goes_before_its_process_groups():
    assert run_ranks(3, ddp_has_gone) == [True] * 3


class Lossless(Toy):
    loss = None


class Unvalidated(Toy):
    def data(self, split: str) -> Any:
        return super().data(split) if split == "train" else None


@pytest.mark.parametrize(
    ("recipe", "callbacks", "told"),
    [
        (Lossless(), {}, "recipe: Lossless has no method 'loss'; define model, data and loss"),
        (Toy(), {"x": object()}, r"callbacks\.x: object is not a callback; give a class that inherits from"),
        (Unvalidated(), {}, r"trainer\.validate_every=5: recipe\.data\('val'\) is None; return"),
    ],
)
def test_what_a_run_needs_is_told_before_it_begins(recipe, callbacks, told):
    with pytest.raises(ConfigError, match=f"^{told}"):
        make(recipe, callbacks, replace(SHORT, validate_every=5))
    assert not list(Path().iterdir())


class Diverging(Toy):
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(model, batch) * math.nan


def test_a_loss_that_is_not_finite_is_told_of_once():
    with pytest.raises(NumericsError):
        make(Diverging(), options=Options(max_steps=4, log_every_steps=1, run_dir="runs/r")).fit()
    assert Path("runs/r/logs/rank0.log").read_text().count("WARNING step 1: the loss is nan") == 1


def refused_alone(place: Place) -> str:
    try:
        make(Loaded() if place.rank else None, place=place)  # rank 0 has no recipe
    except Exception as error:
        return type(error).__name__
    return ""


def test_a_rank_that_is_refused_leaves_its_peers_no_wait():
    assert run_ranks(3, refused_alone, timeout_s=20) == ["ConfigError", "RuntimeError", "RuntimeError"]


def disagree(place: Place, key: str) -> str:
    values = {"max_steps": 2 + place.rank} if key == "trainer.max_steps" else {}
    recipe = Toy(samples=96 + place.rank) if key == "data" else Toy()
    try:
        make(recipe, options=replace(SHORT, **values), place=place)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("key", ["trainer.max_steps", "data"])
def test_ranks_that_were_started_differently_are_told_so(key):
    for told in run_ranks(3, disagree, key):
        assert told.startswith(f"{key} is ") and "on rank 1; start all ranks with the same" in told


class Uses(Callback):
    """What a callback may ask the trainer for, and set on it."""

    def wrap_model(self, trainer, model: nn.Module) -> nn.Module:
        trainer.shared = 1  # in set-up: other callbacks may read it
        return model

    def on_step_end(self, trainer) -> None:
        if trainer.metrics:
            trainer.metrics = trainer.metrics | {"mine": 7.0 + trainer.shared}
        if trainer.step == 1:
            self.validated = trainer.validate()

    def on_fit_end(self, trainer) -> None:
        self.found = trainer.evaluate("val")


def test_a_callback_evaluates_validates_and_adds_numbers_also_to_the_summary():
    uses = Uses()
    trainer = make(Toy(), {"uses": uses})
    summary = trainer.fit()
    assert summary["mine"] == 8.0 and uses.found["val/loss"] == pytest.approx(summary["val/loss"], rel=1e-6)
    assert uses.validated is False and "module" in dir(trainer)
    with pytest.raises(AttributeError, match=r"^'Trainer' object has no attribute 'nothing'$"):
        print(trainer.nothing)
    with refuses("trainer.close", "replaced"):
        trainer.close = lambda: None


class Named(Trainer):
    def __init__(self, *args: Any, **named: Any) -> None:
        self.tag = "mine"
        super().__init__(*args, **named)


def test_a_class_of_ones_own_has_attributes_before_the_run():
    trainer = Named(Toy(), batch=12, options=Options(max_steps=1), place=Place(), data=DataOptions(workers=0))
    trainer.fit()
    assert trainer.tag == "mine" and trainer.step == 1


@pytest.mark.parametrize("name", ["parameters", "optimizer", "batch"])
def test_what_the_steps_would_not_see_is_refused(name):
    class Replaces(Callback):
        def on_step_end(self, trainer) -> None:
            if trainer.step == 2:
                setattr(trainer, name, copy.copy(getattr(trainer, name)) if name != "batch" else 24)

    why = rf"^trainer\.{name} was set, and the steps use what set-up made; "
    with pytest.raises(ConfigError, match=why):
        make(Toy(), {"replaces": Replaces()}, Options(max_steps=4)).fit()


def test_a_further_run_keeps_nothing_of_the_one_before():
    seen: list[Any] = []

    class Sees(Callback):
        def on_fit_start(self, trainer) -> None:
            seen.append([reference() for reference in self.before])

    sees = Sees()
    sees.before = []
    trainer = make(Toy(), {"sees": sees})
    trainer.fit()
    sees.before = [weakref.ref(trainer.module), weakref.ref(trainer.optimizer)]
    trainer.fit(max_steps=4)
    assert seen == [[], [None, None]] and trainer.step == 4


def test_a_parameter_that_is_unfrozen_after_the_optimizer_was_made_is_refused():
    class Frozen(Toy):
        def model(self) -> nn.Module:
            model = super().model()
            model.first.requires_grad_(False)
            return model

    class Unfreezes(Callback):
        def wrap_forward_backward(self, trainer, run: Any) -> Any:
            trainer.module.first.requires_grad_(True)
            return run

    with refuses("first.weight", "1", "recipe.parameter_groups()"):
        make(Frozen(), {"unfreezes": Unfreezes()}).fit()
