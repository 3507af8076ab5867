"""What a recipe's methods may return: anything else is one line that names the method, what came, what is expected."""

import contextlib
import json
import multiprocessing
import os
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.messages import refuses
from support.ranks import run_ranks
from torch import nn
from toy_recipe import Points, Toy

from trainer import timeouts
from trainer.callback import Callback
from trainer.callbacks.nan_guard.callback import NanGuard
from trainer.checks.recipe import CheckedLoss, build_model
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError, NumericsError, exhausted
from trainer.log import log
from trainer.process.environment import Place
from trainer.trainer import Trainer
from trainer.validation import Evaluator

pytestmark = pytest.mark.usefixtures("tmp_path")


def fit(recipe: Any, place: Place | None = None, **options: Any) -> Trainer:
    options = {"max_steps": 4, "log_every_steps": 1, **options}
    trainer = Trainer(recipe, batch=12, options=Options(**options), data=DataOptions(0), place=place or Place())
    trainer.fit()
    return trainer


def with_method(name: str, method: Any) -> Toy:
    return type("Mine", (Toy,), {name: method})()


SUM, COUNT = "as the sum of 'a'", "as the count of 'a'"
ONE_NUMBER = "return a tensor of one number, the mean over the batch"
COUNTS = "return a dict of name -> (sum, count), two numbers"


def frame() -> Any:
    import pandas  # slow

    return pandas.DataFrame({"a": [1]})


@pytest.mark.parametrize(
    ("method", "returned", "message"),
    [
        ("model", None, "model(): returned None; return an nn.Module"),
        ("model", "bert", "model(): returned a value of type str; return an nn.Module"),
        ("model", nn.Identity(), "model(): the model has no parameters; return one with parameters that require"),
        ("model", nn.Linear(2, 2).requires_grad_(False), "model(): all 2 parameters are frozen; return one with"),
        ("loss", 0.5, f"loss(): returned a value of type float; {ONE_NUMBER}"),
        ("loss", None, f"loss(): returned None; {ONE_NUMBER}"),
        ("loss", (torch.zeros(()),), f"loss(): returned a value of type tuple; {ONE_NUMBER}"),
        ("loss", {"a": torch.zeros(())}, "loss(): returned a value of type dict; return the tensor 'loss', and for"),
        ("loss", torch.zeros(12), f"loss(): returned a tensor of shape (12,); {ONE_NUMBER}"),
        ("loss", torch.zeros(()), "loss(): returned a tensor of shape () without a gradient; return a loss with a"),
        ("summary", [1.0], "summary(): returned a value of type list; return a dict of name -> number"),
        ("summary", {"a": "b"}, "summary(): returned a value of type str for 'a'; return a dict of name -> number"),
        ("loss", torch.ones((), dtype=torch.cfloat), f"loss(): returned a complex tensor of shape (); {ONE_NUMBER}"),
        ("metrics", {"a": (torch.tensor(1j), 1)}, f"metrics(): returned a complex tensor of shape () {SUM}; {COUNTS}"),
        ("metrics", {"a": (1j, 1)}, f"metrics(): returned a value of type complex {SUM}; {COUNTS}"),
        ("metrics", {"a": (1, torch.tensor(1j))}, f"metrics(): returned a complex tensor of shape () {COUNT}; return"),
        ("metrics", 0.5, f"metrics(): returned a value of type float; {COUNTS}"),
        ("metrics", {"a": torch.zeros(())}, f"metrics(): returned a tensor of shape () for 'a'; {COUNTS}"),
        ("metrics", {"a": ("0.5", 1)}, f"metrics(): returned a value of type str {SUM}; {COUNTS}"),
        ("metrics", {"a": (0.5, 1.5)}, f"metrics(): returned a value of type float {COUNT}; {COUNTS}"),
        ("metrics", {"a": (torch.ones(3), 1)}, f"metrics(): returned a tensor of shape (3,) {SUM}; {COUNTS}"),
        ("metrics", {"a": (torch.ones(1), "1")}, f"metrics(): returned a value of type str {COUNT}; {COUNTS}"),
        ("metrics", {"a": (torch.ones(1), -1)}, f"metrics(): returned -1 {COUNT}; return the number of items, 0 or"),
        ("weight", None, "weight(): returned a value of type NoneType; return the number of items, an int of 0 or"),
        ("weight", 2.5, "weight(): returned 2.5; return the number of items, an int of 0 or more"),
        ("weight", -1, "weight(): returned -1; return the number of items, an int of 0 or more"),
        ("collate", None, "collate(): returned None; return the batch"),
        ("data", Toy, "data('train'): returned the class Toy; return an object of it"),
        ("data", (np.zeros((8, 4)), np.zeros(8)), "data('train'): returned a tuple of arrays; return a Dataset"),
        ("data", frame, "data('train'): returned a DataFrame, whose items are columns; return"),
        ("data", {"train": Toy().data("train")}, "data('train'): returned a dict of data sets; return one of them"),
        ("data", 64, "data('train'): returned a value of type int; return shards, a Dataset, or an iterable"),
        ("tokens_per_sample", 0, "tokens_per_sample: is a value of type method; make it a number, or a method with"),
    ],
)  # fmt: skip
def test_one_line_before_the_first_step(method, returned, message):
    recipe = with_method(method, lambda *_: returned() if returned is frame else returned)
    steps: list[int] = []
    with pytest.raises(ConfigError, match=f"^{re.escape(f'recipe.{message}')}") as error:
        trainer = None
        options = Options(max_steps=4, log_every_steps=1)
        trainer = Trainer(recipe, batch=12, options=options, data=DataOptions(0), place=Place())
        trainer.hooks["on_step_end"].append(lambda trainer: steps.append(trainer.step))
        trainer.fit()
    assert "\n" not in str(error.value)
    assert not steps


@pytest.mark.parametrize(
    ("method", "written", "called"),
    [
        ("transform", lambda self, sample: sample, "transform(sample): is called with (sample, rng)"),
        ("val_transform", lambda self, s: s, "val_transform(s): is called with (sample, rng)"),
        ("loss", lambda self, batch: batch, "loss(batch): is called with (model, batch)"),
        ("data", lambda self: None, "data(): is called with (split)"),
        ("collate", lambda self, samples, more: samples, "collate(samples, more): is called with (samples)"),
        ("summary", lambda self, model: {}, "summary(model): is called with ()"),
    ],
)
def test_a_method_with_other_parameters_is_one_line(method, written, called):
    with pytest.raises(ConfigError, match=f"^{re.escape(f'recipe.{called}; give it these parameters')}$"):
        Trainer(with_method(method, written), batch=12, data=DataOptions(0), place=Place())


@pytest.mark.parametrize("method", [lambda *both, **more: Toy.loss(*both), partial(Toy.loss, Toy())])
def test_a_method_may_take_more_or_be_a_partial(method):
    assert fit(with_method("loss", method)).step == 4


def test_a_loss_of_no_items_needs_no_gradient():
    """A micro-batch of weight 0 contributes nothing, whatever its loss; the next one is checked."""
    loss = CheckedLoss(lambda model, batch: torch.zeros(()), weight=lambda batch: batch)
    assert loss.compute(nn.Identity(), 0) == 0
    with refuses("recipe.loss()", "detach()"):
        loss.compute(nn.Identity(), 1)


@pytest.mark.parametrize("count", [torch.tensor(3), 3.0])
def test_a_weight_that_is_a_whole_number_of_another_type(count):
    assert fit(with_method("weight", lambda *_: count)).step == 4


def calls_a_method(place: Place) -> str:
    class Model(nn.Linear):
        def training_step(self, batch):
            return self(batch["x"]).square().mean()

    recipe = with_method("loss", lambda self, model, batch: model.training_step(batch))
    type(recipe).model = lambda self: Model(8, 1)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return str(fit(recipe, place).step)
    except ConfigError as error:
        return str(error)


def test_on_several_ranks_a_loss_calls_the_model_itself():
    assert calls_a_method(Place()) == "4"
    line = (
        "recipe.loss(): uses model.training_step, which DistributedDataParallel lacks; call model(...) itself, so "
        "that ranks average its gradients"
    )
    assert run_ranks(2, calls_a_method) == [line, line]


def fails_in_summary(place: Place) -> str:
    def summary(self):
        assert place.rank == 0
        raise KeyError("mine")

    try:
        return str(fit(with_method("summary", summary), place).step)
    except Exception as error:
        return repr(error)


def test_all_ranks_hear_that_rank_0s_summary_failed():
    failed = "DistError('rank 0 failed in recipe.summary()')"
    assert run_ranks(3, fails_in_summary) == ["KeyError('mine')", failed, failed]


def misspells_in_a_part(place: Place) -> str:
    class Part(nn.Linear):
        def forward(self, input):
            return super().forward(self.drop(input))

    class Model(nn.Sequential):
        drop = nn.Identity()

    recipe = with_method("loss", lambda self, model, batch: model(batch["x"]).square().mean())
    type(recipe).model = lambda self: Model(Part(8, 1))  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return str(fit(recipe, place).step)
    except AttributeError as error:
        return str(error)


def test_a_misspelt_attribute_of_a_part_is_not_taken_for_the_loss():
    """The model has an attribute of that name."""
    assert run_ranks(2, misspells_in_a_part) == ["'Part' object has no attribute 'drop'"] * 2


def test_a_loss_of_one_dimension_is_judged_too(tmp_path):
    recipe = with_method("loss", lambda self, model, batch: Toy.loss(self, model, batch).reshape(1))
    trainer = Trainer(recipe, {"nan_guard": NanGuard()}, batch=12, options=Options(max_steps=2))
    trainer.fit()
    assert trainer.step == 2


def test_a_lock_that_is_held_is_no_limit_of_processes(monkeypatch):
    """A fork that fails is one. A pipe without bytes raises in its place, as `fork` does: with no frame of its own."""
    reads, writes = os.pipe2(os.O_NONBLOCK)
    try:
        with pytest.raises(BlockingIOError) as held:
            os.read(reads, 1)
        monkeypatch.setattr(os, "fork", partial(os.read, reads, 1))
        with pytest.raises(BlockingIOError) as forked:
            multiprocessing.get_context("fork").Process(target=print).start()
    finally:
        os.close(reads)
        os.close(writes)
    assert not exhausted(held.value) and "too few processes" in exhausted(forked.value)


@pytest.mark.parametrize(("user", "named"), [(0, "pids.max of "), (1000, "ulimit -u=7, or pids.max of ")])
def test_the_limit_of_processes_that_holds_is_named(user, named, monkeypatch):
    """ulimit -u does not hold for root; a container, or a unit of systemd, has a limit of its own."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr("trainer.errors.resource.getrlimit", lambda kind: (7, 7))
    assert exhausted(RuntimeError("can't start new thread")).startswith(named)


def test_a_misspelt_attribute_stays_the_users_own_error():
    with pytest.raises(AttributeError, match="forwrd"):
        fit(with_method("loss", lambda self, model, batch: model.forwrd(batch)))


def nan_until(step: int) -> Toy:
    seen: list[int] = []

    def loss(self, model, batch):
        seen.extend([0] * model.training)
        return Toy.loss(self, model, batch) * (1.0 if len(seen) > step else float("nan"))

    return with_method("loss", loss)


def nan_from(step: int) -> Toy:
    """Its loss is not finite at that step of training alone, after which the weights are not."""
    seen: list[int] = []

    def loss(self, model, batch):
        seen.extend([0] * model.training)
        return Toy.loss(self, model, batch) * (float("nan") if len(seen) == step else 1.0)

    return with_method("loss", loss)


def test_a_loss_that_was_never_finite_is_no_success():
    with pytest.raises(NumericsError, match=r"^train/loss was finite at no logged step up to step 1; "):
        fit(nan_until(99))


@pytest.mark.parametrize("log_every_steps", [1, 50])  # 50: the checkpoint of step 3 finds out
def test_weights_that_are_not_finite_end_the_run_and_are_in_no_checkpoint(log_every_steps):
    options = {"run_dir": "runs/r", "checkpoint": CheckpointOptions(every_steps=1), "log_every_steps": log_every_steps}
    words = r"is not finite since step 3; .*trainer.resume=ckpt/r/step-00000002 restarts from the last finite"
    with pytest.raises(NumericsError, match=words if log_every_steps == 1 else "was finite at no logged step up to"):
        fit(nan_from(3), max_steps=9, **options)
    summary = json.loads(Path("runs/r/summary.json").read_text())
    assert (summary["stopped"], summary["steps"]) == ("not finite", 3)
    assert sorted(path.name for path in Path("ckpt/r").glob("step-*")) == ["step-00000001", "step-00000002"]
    assert fit(Toy(), resume="auto", **options).step == 4  # by a recipe that was corrected
    assert json.loads(Path("runs/r/summary.json").read_text())["stopped"] == "max_steps"


def spoilt_from(step: int) -> Toy:
    """Its loss is not finite from that step of training on, and the weights stay finite: a constant has no gradient."""
    seen: list[int] = []

    def loss(self, model, batch):
        seen.extend([0] * model.training)
        return Toy.loss(self, model, batch) + (float("nan") if len(seen) >= step else 0.0)

    return with_method("loss", loss)


@pytest.mark.parametrize(("spoilt", "steps", "kept"), [(4, 6, [2, 3]), (9, 9, [7, 8])])
def test_a_loss_that_stays_not_finite_ends_the_run_and_replaces_no_checkpoint(spoilt, steps, kept):
    """The last step of a run needs no second one."""
    checkpoint = CheckpointOptions(every_steps=1, keep=2)
    options = {"run_dir": "runs/r", "checkpoint": checkpoint, "log_every_steps": 1 if spoilt == 9 else 2}
    with pytest.raises(NumericsError, match=rf"is not finite since step {spoilt}; .*ckpt/r/step-0000000{kept[-1]} "):
        fit(spoilt_from(spoilt), max_steps=9, **options)
    summary = json.loads(Path("runs/r/summary.json").read_text())
    assert (summary["stopped"], summary["steps"]) == ("not finite", steps)
    assert sorted(path.name for path in Path("ckpt/r").glob("step-*")) == [f"step-0000000{step}" for step in kept]


def test_one_loss_that_is_not_finite_is_a_warning_if_the_weights_stay_finite():
    recipe = nan_from(2)
    assert Trainer(
        recipe, {"nan_guard": NanGuard()}, batch=12, options=Options(max_steps=4, log_every_steps=1), place=Place(),
        data=DataOptions(0),
    ).fit()["stopped"] == "max_steps"  # fmt: skip


def one_rank_of_three(place: Place) -> tuple[str, int]:
    """The weights of rank 1 alone are spoilt, as by its memory."""

    class Spoils(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.step == 2 and trainer.rank == 1:
                trainer.parameters[0].data[0] = float("nan")

    options = Options(
        max_steps=4, run_dir="runs/r", check_replicas_every=None, checkpoint=CheckpointOptions(every_steps=2)
    )
    trainer = Trainer(Toy(), [Spoils()], batch=12, options=options, data=DataOptions(0), place=place)
    with pytest.raises(NumericsError):
        trainer.fit()
    return trainer.stop_reason, trainer.step


def test_one_rank_whose_weights_are_not_finite_ends_the_run_on_all():
    assert run_ranks(3, one_rank_of_three) == [("not finite", 2)] * 3
    assert not list(Path("ckpt/r").glob("step-*"))


def test_a_batch_larger_than_the_data_is_told(capsys):
    recipe = Toy(samples=4)
    fit(recipe)
    assert (
        "batch=12: recipe.data('train') has 4 samples, so a step takes each sample 3 times" in capsys.readouterr().out
    )


def test_a_second_fit_is_refused_and_deletes_nothing(tmp_path):
    trainer = fit(Toy(), run_dir="runs/r")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with refuses("fit", "4", "4", "fit(max_steps=8)"):
        trainer.fit()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_counts_of_zero_are_the_metrics_own_fault():
    recipe = with_method("metrics", lambda self, model, batch: {"a": (torch.zeros(()), 0), "b": (torch.ones(()), 0)})
    with refuses("recipe.metrics()", "0", "recipe"):
        fit(recipe)


def test_one_metric_that_counts_nothing_is_named_once(capsys):
    one = torch.ones(())
    recipe = with_method("metrics", lambda self, model, batch: {"a": (one, 1), "b": (one, 0)})
    assert set(fit(recipe, validate_every="2 steps").validation) == {"val/a"}
    assert capsys.readouterr().out.count("validation: val/b: the count is 0 in every batch, so there is no value") == 1


def test_two_batches_are_tried_before_the_first_step():
    """The second one, too: it may be what is wrong."""
    made: list[str] = []

    def metrics(self, model, batch):
        made.append("metrics")
        return {"a": (batch["x"].sum(), len(batch["x"]))} if len(made) == 1 else {"a": 0.0}

    with pytest.raises(ConfigError, match=r"^recipe.metrics\(\): returned a value of type float for 'a'"):
        Trainer(with_method("metrics", metrics), batch=6, options=Options(max_steps=4), data=DataOptions(0))
    assert made == ["metrics"] * 2


class Drawing(Toy):
    """Its validation data and its metrics draw."""

    def __init__(self, metrics: bool) -> None:
        super().__init__(dropout=0.5)
        if metrics:
            self.metrics = self.measure

    def data(self, split):
        return super().data(split) if split == "train" else Drawn(13, torch.float32)

    def measure(self, model, batch):
        return {"a": (torch.rand(()) * model(batch["x"]).sum(), len(batch["x"]))}


class Drawn(Points):
    taken = 0

    def __getitem__(self, i):
        Drawn.taken += 1
        return {name: value * (random.random() + torch.rand(())) for name, value in super().__getitem__(i).items()}


def weights_after(place: Place, metrics: bool, tries: bool) -> tuple[list[Any], int]:
    """The weights of a run with dropout, and the validation samples that were read."""
    Drawn.taken = 0
    with contextlib.nullcontext() if tries else mock.patch.object(Evaluator, "try_out"):
        trainer = fit(Drawing(metrics), place)
    return [p.tolist() for p in trainer.module.parameters()], Drawn.taken


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("metrics", [False, True])
def test_the_trial_changes_no_bit(metrics, world):
    tried = run_ranks(world, weights_after, metrics, True)
    plain = run_ranks(world, weights_after, metrics, False)
    assert [weights for weights, _ in tried] == [weights for weights, _ in plain]
    assert 13 <= sum(taken for _, taken in plain) < sum(taken for _, taken in tried)


def test_a_long_validation_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(timeouts, "LOG_EVERY_S", 0.0)
    fit(Toy())
    assert "validation: 2 batches so far" in capsys.readouterr().out


WRAPPED = [torch.compile, nn.DataParallel, lambda model: nn.DataParallel(torch.compile(model))]  # what recipes return


@pytest.mark.parametrize("wrap", WRAPPED)
def test_a_model_in_a_wrapper_is_trained_and_saved_without_it(wrap, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(log, "warning", lambda text, *values: told.append(text % values))
    trainer = fit(with_method("model", lambda self: wrap(Toy().model())))
    assert trainer.module.state_dict().keys() == Toy().model().state_dict().keys()
    assert any(line.startswith("recipe.model(): is wrapped in") for line in told)


def test_a_recipes_run_without_a_limit_is_refused_and_a_callback_may_be_the_limit():
    def make(callbacks):
        return Trainer(Toy(), callbacks, batch=12, data=DataOptions(0), place=Place())

    with refuses("trainer.max_steps=null", "never", "trainer.max_steps", "epochs"):
        make([]).fit()

    class Ends(Callback):
        def on_step_end(self, trainer):
            if trainer.step == 3:
                trainer.stop("enough")

    assert make([Ends()]).fit()["steps"] == 3


class Inside(Toy):
    """Its model has a part that is compiled or spread over devices."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.wrap = wrap

    def model(self) -> nn.Module:
        return nn.Sequential(self.wrap(nn.Linear(12, 2)))


@pytest.mark.parametrize(
    ("wrap", "fix"),
    [
        (torch.compile, "call model.0.compile() instead of torch.compile(model.0)"),
        (nn.DataParallel, "leave it out, trainer.devices=N"),
    ],
)
def test_a_wrapped_part_is_refused_by_its_name(wrap: Any, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_model(Inside(wrap))
    assert str(refused.value).startswith("recipe.model(): 0 is wrapped in ") and fix in str(refused.value)
