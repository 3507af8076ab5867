"""The average and its BatchNorm against torch.optim.swa_utils and by hand; resumed, rolled back, stopped."""

import json
import math
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.cli import run
from support.messages import refuses
from support.ranks import run_ranks
from support.sharded import whole
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import TensorDataset, default_collate
from toy_recipe import Points, Toy

from trainer.callback import Callback
from trainer.callbacks.ema import EMA
from trainer.callbacks.local_sgd.callback import LocalSGD
from trainer.callbacks.nan_guard.callback import NanGuard
from trainer.callbacks.overlap.callback import Overlap
from trainer.callbacks.pipeline.callback import PipelineParallel
from trainer.callbacks.shard.callback import Shard
from trainer.callbacks.swa import SWA
from trainer.composition import arrange
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.errors import ConfigError
from trainer.optim.schedule import Constant
from trainer.parallel.batch_norm import layers_with_statistics
from trainer.process.environment import Place
from trainer.tools.export import average_of
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")


class Normed(Toy):
    """With running statistics."""

    def model(self) -> nn.Module:
        net = super().model()
        net.add_module("first", nn.Sequential(net.get_submodule("first"), nn.BatchNorm1d(self.width)).to(self.dtype))
        return net


class Batches(Normed):
    """An iterable of batches."""

    def data(self, split: str) -> Any:
        points = super().data(split)
        return [default_collate([points[i + j] for j in range(12)]) for i in range(0, 12 if split == "val" else 84, 12)]


class Stops(Normed):
    """A signal to stop comes during the pass for BatchNorm, which alone trains without gradients."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if model.training and not torch.is_grad_enabled():
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch)


class History(Callback):
    """The samples of each step, weights after it, and what each validation has seen."""

    def __init__(self) -> None:
        self.refs: list[list[int]] = []
        self.weights: list[np.ndarray] = []
        self.validated: list[tuple[int, bool, float]] = []

    def on_fit_start(self, trainer) -> None:
        self.weights.append(flat(trainer.module))

    def on_step_end(self, trainer) -> None:
        self.refs.append([ref.shard for ref in trainer.data.refs])
        self.weights.append(flat(trainer.module))

    def on_fit_end(self, trainer) -> None:
        """Gathers what is whole only while the ranks are together."""
        self.end = flat(trainer.module)
        self.average = {name: whole(value).numpy().copy() for name, value in trainer.eval_model.state_dict().items()}

    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        self.validated.append((trainer.step, trainer.eval_model is trainer.module, metrics["val/loss"]))


def flat(module: nn.Module) -> np.ndarray:
    return np.concatenate([whole(p).numpy().ravel().copy() for p in module.parameters()])


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, 0.1, momentum=0.5)


def train(
    recipe: Any, place: Place, callbacks: dict[str, Callback], steps: int = 8, name: str = "r", **options: Any
) -> Trainer:
    trainer = Trainer(
        recipe, callbacks, sgd, batch=12,
        options=Options(
            max_steps=steps, run_dir=f"runs/{name}", ddp=DDPOptions(bucket_mib=0.004),
            **{"validate_every": None, **options},
        ),
        data=DataOptions(workers=0, shuffle_shards=5, shuffle_window=4),
        place=place,
    )  # fmt: skip
    trainer.fit()
    return trainer


def batch_of(recipe: Toy, refs: list[int]) -> dict[str, Tensor]:
    points = recipe.data("train")
    return default_collate([points[i] for i in refs])


def loss_of(recipe: Toy, weights: nn.Module) -> float:
    """The validation loss of weights, in a model of their own."""
    model = recipe.model().eval()
    model.load_state_dict(weights.state_dict())
    points = recipe.data("val")
    return recipe.loss(model, default_collate([points[i] for i in range(13)])).item()


def test_a_bare_loop_with_torchs_averaged_model_has_the_same_average():
    recipe, history = Toy(dtype="float64"), History()
    trainer = train(recipe, Place(), {"swa": SWA(start=3, every=2), "history": history}, steps=9)
    torch.manual_seed(trainer.options.seed)
    model = recipe.model()
    np.testing.assert_array_equal(flat(model), history.weights[0])
    optimizer, averaged = sgd(model.parameters()), AveragedModel(model)
    for step, refs in enumerate(history.refs, start=1):
        optimizer.zero_grad()
        recipe.loss(model, batch_of(recipe, refs)).backward()
        optimizer.step()
        if step in (3, 5, 7, 9):
            averaged.update_parameters(model)
    assert int(averaged.n_averaged) == 4
    np.testing.assert_allclose(flat(trainer.eval_model), flat(averaged.module), rtol=1e-10)
    np.testing.assert_allclose(trainer.validation["val/loss"], loss_of(recipe, averaged.module), rtol=1e-10)
    assert not any(p.requires_grad for p in trainer.eval_model.parameters())


@pytest.mark.parametrize(
    ("knobs", "steps"),
    [
        ({"start": 2, "every": 3}, [2, 5, 8]),
        ({"start": "24 samples", "every": "1 epochs"}, [2]),  # an epoch has 96 samples, 8 steps
        ({"every": 1}, [6, 7, 8]),  # three quarters of 8 steps
        ({"start": 0, "every": 4}, [4, 8]),
        ({"start": 8, "every": 1}, [8]),
    ],
)
def test_periods_by_hand(knobs, steps):
    history = History()
    trainer = train(Toy(dtype="float64"), Place(), {"swa": SWA(**knobs), "history": history})
    expected = np.mean([history.weights[step] for step in steps], axis=0)
    np.testing.assert_allclose(flat(trainer.eval_model), expected, rtol=1e-12)
    np.testing.assert_array_equal(flat(trainer.module), history.weights[8])


@pytest.mark.parametrize(
    ("knobs", "ends"),
    [
        ({}, [288, 384]),  # from three quarters of 4 epochs of 96 samples, not of the steps: 15 of 20
        ({"every": "40 samples"}, [288, 328, 368]),
        ({"start": "2.5 epochs"}, [240, 336]),
        ({"start": "1 epochs"}, [96, 192, 288, 384]),
    ],
)
def test_after_a_resume_with_another_batch_samples_count(knobs, ends):
    """Two epochs of 48 samples a step, then two of 12."""

    def fit(batch: int, epochs: int, **callbacks: Callback) -> Trainer:
        options = Options(max_epochs=epochs, run_dir="runs/r", resume="auto", accept=["batch", "callbacks"])
        own = {"batch": batch, "options": options, "data": DataOptions(workers=0), "place": Place()}
        trainer = Trainer(Toy(dtype="float64"), callbacks, sgd, **own)
        trainer.fit()
        return trainer

    swa, before, history = SWA(update_bn=0, **knobs), History(), History()
    fit(48, 2, history=before, **({"swa": SWA(update_bn=0, **knobs)} if ends[0] < 192 else {}))
    trainer = fit(12, 4, swa=swa, history=history)
    assert (trainer.step, trainer.samples) == (4 + 16, 4 * 96)
    weights = [before.weights[end // 48] if end <= 192 else history.weights[math.ceil(end / 12) - 16] for end in ends]
    np.testing.assert_allclose(flat(trainer.eval_model), np.mean(weights, axis=0), rtol=1e-12)
    assert int(swa.averaged) == len(ends)


def test_validation_is_of_the_plain_weights_before_the_start_and_then_of_the_average():
    recipe, history = Toy(dtype="float64"), History()
    swa = SWA(start=5, every=1)
    trainer = train(recipe, Place(), {"swa": swa, "history": history}, validate_every=2)
    assert [(step, plain) for step, plain, _ in history.validated] == [(2, True), (4, True), (6, False), (8, False)]
    model = recipe.model()
    for step, plain, loss in history.validated:
        weights = history.weights[step] if plain else np.mean(history.weights[5 : step + 1], axis=0)
        nn.utils.vector_to_parameters(torch.from_numpy(weights), model.parameters())
        assert loss == pytest.approx(loss_of(recipe, model), rel=1e-10)
    assert trainer.validation["val/loss"] == history.validated[-1][2]


def normalised(
    place: Place,
    swa: dict[str, Any] | None,
    callbacks: Any = dict,
    recipe: Any = Normed,
    arguments: Any = None,
    **run: Any,
) -> dict[str, Any]:
    """A run of a model with BatchNorm."""
    history, own = History(), {"swa": SWA(**swa)} if swa is not None else {}
    made = recipe(**(arguments or {}))
    trainer = train(made, place, {**own, "history": history, **callbacks()}, **run)
    return {
        "refs": history.refs,
        "end": history.end,
        "average": history.average,
        "validation": trainer.validation,
        "validated": history.validated,
        "stopped": trainer.stop_reason,
        "saved": str(trainer.checkpoint),
        "counts": [count for each in own.values() for count in (int(each.averaged), int(each.updated))],
    }


def expected_statistics(average: dict[str, np.ndarray], batches: list[list[int]], **arguments: Any) -> nn.Module:
    recipe = Normed(**arguments)
    model = recipe.model()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in average.items()})
    update_bn([batch_of(recipe, refs)["x"] for refs in batches], model)
    return model


def test_statistics_of_batch_norm_have_the_bits_of_update_bn():
    """An epoch has 8 steps of 12 samples."""
    found = normalised(Place(), {"start": 3, "every": 2}, steps=9)
    model = expected_statistics(found["average"], found["refs"][:8])
    names = [name for name, _ in model.named_buffers()]
    assert len(names) == 3 and int(found["average"]["first.1.num_batches_tracked"]) == 8
    for name in names:
        np.testing.assert_array_equal(found["average"][name], model.state_dict()[name].numpy())
    assert found["validation"]["val/loss"] == pytest.approx(loss_of(Normed(), model), rel=1e-6)
    copied = normalised(Place(), {"start": 3, "every": 2, "update_bn": 0}, steps=9, name="copied")
    assert int(copied["average"]["first.1.num_batches_tracked"]) == 9  # the run's own
    assert copied["validation"] != found["validation"]


def sharded() -> dict[str, Callback]:
    return {"shard": Shard(stage=3)}


def overlapped() -> dict[str, Callback]:
    return {"overlap": Overlap()}


def staged() -> dict[str, Callback]:
    return {"pipeline": PipelineParallel(stages=3, schedule="gpipe")}


SOME = {"start": 3, "every": 2, "update_bn": 5}
DOUBLE = {"dtype": "float64"}


def test_ranks_have_the_statistics_of_one_rank_that_sees_the_batches_of_all():
    ranks = run_ranks(3, partial(normalised, steps=7, arguments=DOUBLE), SOME)
    batches = [refs for rank in ranks for refs in rank["refs"][:5]]
    assert {len(refs) for refs in batches} == {4} and len(batches) == 15
    model = expected_statistics(ranks[0]["average"], batches, **DOUBLE)
    for name, buffer in model.named_buffers():
        for rank in ranks:
            np.testing.assert_allclose(rank["average"][name], buffer.numpy(), rtol=1e-9)
    assert int(ranks[0]["average"]["first.1.num_batches_tracked"]) == 15
    rows = run_ranks(3, partial(normalised, steps=7, arguments=DOUBLE, name="rows"), SOME, sharded)
    for rank in rows:
        for name, value in ranks[0]["average"].items():
            np.testing.assert_allclose(rank["average"][name], value, rtol=1e-6)
        assert rank["validation"] == pytest.approx(ranks[0]["validation"], rel=1e-6)


def test_stages_have_the_statistics_of_the_unsplit_model():
    one = normalised(Place(), SOME, steps=7, arguments={"depth": 3})
    ranks = run_ranks(3, partial(normalised, steps=7, arguments={"depth": 3}, name="stages"), SOME, staged)
    first = ranks[0]["average"]
    for name in ("first.1.running_mean", "first.1.running_var", "first.1.num_batches_tracked"):
        np.testing.assert_allclose(first[name], one["average"][name], rtol=1e-5)
    assert all(rank["validation"] == pytest.approx(one["validation"], rel=1e-5) for rank in ranks)


@pytest.mark.parametrize("knobs", [{"dropout": 0.3}, {}], ids=["dropout", "plain"])
def test_training_keeps_its_bits_and_its_place_in_the_data(knobs):
    """The passes for BatchNorm draw numbers for dropout, and read data in this process."""
    plain = normalised(Place(), None, arguments=knobs, steps=9, validate_every=2)
    swa = normalised(Place(), SOME, arguments=knobs, steps=9, validate_every=2, name="swa")
    assert swa["refs"] == plain["refs"] and swa["counts"] == [4, 4]
    np.testing.assert_array_equal(swa["end"], plain["end"])
    assert swa["validated"][0][2] == plain["validated"][0][2] and swa["validated"][1][2] != plain["validated"][1][2]


@pytest.mark.slow
def test_with_deferred_steps_the_average_has_the_same_bits():
    runs = [
        run_ranks(3, partial(normalised, steps=8, name=f"r{len(callbacks())}"), SOME, callbacks)
        for callbacks in (dict, overlapped)
    ]
    for plain, deferred in zip(*runs, strict=True):
        assert plain["average"].keys() == deferred["average"].keys()
        for name, value in plain["average"].items():
            np.testing.assert_array_equal(value, deferred["average"][name])


@pytest.mark.parametrize("at", [pytest.param(2, marks=pytest.mark.slow), 5], ids=["before the start", "in the middle"])
def test_a_resume_in_the_middle_of_the_average_has_the_same_bits(at):
    """With an average of the checkpoint's one weight set, and a step to the next."""
    knobs = {"start": 4, "every": 2, "update_bn": "1 epochs"}
    run_whole = partial(normalised, arguments={"dropout": 0.2}, validate_every=3)
    straight = run_ranks(3, run_whole, knobs)
    part = partial(run_whole, checkpoint=CheckpointOptions(every_steps=at, keep=9))
    run_ranks(3, partial(part, name="part"), knobs)
    resumed = run_ranks(3, partial(part, name="again", resume=f"ckpt/part/step-{at:08d}"), knobs)
    for one, other in zip(straight, resumed, strict=True):
        np.testing.assert_array_equal(one["end"], other["end"])
        assert one["counts"] == other["counts"] == [3, 3]
        assert one["validated"][-2:] == other["validated"][-2:]
        for name, value in one["average"].items():
            np.testing.assert_array_equal(value, other["average"][name])


@pytest.mark.slow
def test_a_checkpoint_loads_on_other_ranks_and_in_another_layout():
    knobs = {"start": 3, "every": 1, "update_bn": 0}
    for written, callbacks in (("rows", sharded), ("stages", staged), ("whole", dict)):
        part = partial(normalised, steps=5, name=written, arguments={"depth": 3, **DOUBLE})
        ranks = run_ranks(3, part, knobs, callbacks)
        average = {}
        for rank in reversed(ranks):  # the buffers before the blocks are those of the first stage
            average |= {name: value for name, value in rank["average"].items() if not np.isnan(value).any()}
        for world, other in ((2, dict), (3, sharded), (1, dict)):
            again = partial(part, name=f"{written}-{world}-{other.__name__}", resume=ranks[0]["saved"])
            found = run_ranks(world, again, knobs, other)[0]
            assert found["counts"] == [3, 0] and found["average"].keys() == average.keys()
            for name, value in average.items():
                np.testing.assert_array_equal(found["average"][name], value)


def test_an_average_that_begins_after_the_checkpoint_begins_anew(capsys):
    normalised(Place(), {"start": 3, "every": 1}, steps=5)
    found = normalised(Place(), {"start": 7, "every": 1}, name="again", resume="ckpt/r")
    assert found["counts"] == [2, 2]
    assert "the average of the checkpoint began before step 7, and is dropped" in capsys.readouterr().out


def test_a_signal_ends_the_pass_for_batch_norm_and_a_resume_makes_up_for_it():
    knobs = {"start": 4, "every": 2}
    straight = normalised(Place(), knobs, validate_every=5)
    stopped = normalised(Place(), knobs, recipe=Stops, validate_every=5, name="stopped")
    assert (stopped["stopped"], stopped["counts"]) == ("signal", [1, 0])
    assert len(stopped["refs"]) == 5 and not stopped["validated"]
    resumed = normalised(Place(), knobs, validate_every=5, name="resumed", resume="ckpt/stopped")
    assert resumed["validated"] == straight["validated"] and resumed["stopped"] == "max_steps"
    for name, value in straight["average"].items():
        np.testing.assert_array_equal(resumed["average"][name], value)


def test_a_signal_in_the_last_pass_stops_all_ranks_before_the_export():
    for rank in run_ranks(2, partial(normalised, recipe=Stops), {"start": 4, "every": 2}):
        assert (rank["stopped"], rank["counts"], rank["validated"]) == ("signal", [3, 0], [])
        assert len(rank["refs"]) == 8


class StopsOne(Stops):
    """The signal comes to one rank, and validation has one sample, so some rank has none."""

    def __init__(self, rank: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.rank = rank

    def data(self, split: str) -> Any:
        return Points(96 if split == "train" else 1, self.dtype)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (super().loss if dist.get_rank() == self.rank else Toy.loss.__get__(self))(model, batch)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_a_rank_without_validation_data_drops_the_validation(rank):
    stops = partial(normalised, recipe=StopsOne, arguments={"rank": rank}, validate_every=4)
    for found in run_ranks(2, stops, {"start": 4, "every": 2}):
        assert (found["stopped"], found["counts"], found["validated"]) == ("signal", [1, 0], [])
        assert len(found["refs"]) == 4


class Spike(Toy):
    """The loss of one step is not a number."""

    def __init__(self, bad: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.bad, self.calls = bad, 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.calls += torch.is_grad_enabled()
        return super().loss(model, batch) * (float("nan") if self.calls == self.bad else 1.0)


def test_a_rollback_takes_weights_back_out_of_the_average():
    """The copy is of step 3, with the weights of steps 2 and 3; steps 4 and 5 are undone, and 5 counts as the third."""
    history = History()
    trainer = train(
        Spike(5, dtype="float64"), Place(),
        {"swa": SWA(start=2, every=1), "guard": NanGuard("rollback", every=3), "history": history}, steps=6,
    )  # fmt: skip
    weights = history.weights
    np.testing.assert_array_equal(weights[5], weights[3])
    expected = (weights[2] + weights[3] + weights[5] + weights[6]) / 4
    np.testing.assert_allclose(flat(trainer.eval_model), expected, rtol=1e-12)


class Centred(nn.Module):
    """Centres its input by a running mean, which each pass assigns."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return self.layer(x - self.mean)


class Centres:
    def model(self) -> nn.Module:
        return Centred()

    def data(self, split: str) -> Any:
        return TensorDataset(torch.full((64, 1), 8.0))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()

    def metrics(self, model: Any, batch: Any) -> Any:
        return {"mean": (model.mean.sum(), 1)}


def test_validation_has_the_buffers_of_its_step():
    """After 8 steps the mean is 8 * (1 - 2^-8), as without the callback; the only weights that count are of step 6.

    The pass for BatchNorm runs once for them, and not again for the buffers.
    """
    swa, means = SWA(), dict[int, float]()

    class Means(Callback):
        def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
            means[trainer.step] = metrics["val/mean"]

    options = Options(max_steps=8, run_dir="runs/r", validate_every=3)
    trainer = Trainer(
        Centres(), {"swa": swa, "means": Means()}, batch=16, options=options, data=DataOptions(workers=0), place=Place()
    )
    trainer.fit()
    assert (int(swa.averaged), int(swa.updated)) == (1, 1)
    assert means == {3: 7, 6: 7.875, 8: 7.96875}
    assert trainer.eval_model.get_buffer("layer.0.num_batches_tracked") == 4  # of the pass, not of 8 steps


def test_a_model_without_batch_norm_has_no_pass():
    class Counted(Toy):
        calls = 0

        def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            self.calls += model.training
            return super().loss(model, batch)

    recipe = Counted()
    train(recipe, Place(), {"swa": SWA(start=2, every=1)}, steps=5)
    assert recipe.calls == 5


def test_a_frozen_layer_keeps_its_statistics():
    model = Normed().model()
    assert len(layers_with_statistics(model)) == 1
    model.eval()
    assert layers_with_statistics(model) == []
    assert layers_with_statistics(nn.BatchNorm1d(2, track_running_stats=False)) == []


def test_an_export_takes_the_average_if_there_is_one():
    weights = {"a": torch.zeros(1)}
    assert average_of({"average": weights, "averaged": torch.ones(())}) == weights
    assert average_of(weights) == weights  # of `ema`
    assert not average_of({}) and average_of(None) is None


@pytest.mark.parametrize(
    ("knobs", "recipe", "message"),
    [
        ({"start": "soon"}, Toy, r"callbacks\.swa\.start=soon: is not a duration; write for example"),
        ({"every": 0}, Toy, r"callbacks\.swa\.every=0: must be more than 0"),
        ({"every": "5 minutes"}, Toy, r"callbacks\.swa\.every=5 minutes: must be a number of steps known before"),
        ({"start": 9}, Toy, r"callbacks\.swa\.start=9: the first weights to average are those of step 9, and the run"),
        ({"start": 0, "every": 9}, Toy, r"callbacks\.swa\.every=9: .* step 9, and the run ends at step 8; give an ear"),
        ({"every": 1}, Batches, r"callbacks\.swa\.update_bn=1 epochs: the model has BatchNorm, and .*=0$"),
        ({"every": 1, "update_bn": 3}, Batches, r"callbacks\.swa\.update_bn=3: the model has BatchNorm, and .*=0$"),
    ],
)
def test_knobs_that_cannot_work(knobs, recipe, message):
    with pytest.raises(ConfigError, match=message):
        train(recipe(), Place(), {"swa": SWA(**knobs)})


def test_an_iterable_has_an_average_with_the_statistics_of_the_run():
    trainer = train(Batches(), Place(), {"swa": SWA(every=1, update_bn=0)})
    assert int(trainer.eval_model.get_buffer("first.1.num_batches_tracked")) == 8


def test_an_open_end_needs_a_duration():
    with refuses("callbacks.swa.start=null", "trainer.max_steps"):
        Trainer(
            Toy(), {"swa": SWA()}, sgd, Constant(), batch=12, options=Options(max_steps=None), place=Place(),
            data=DataOptions(workers=0),
        ).fit()  # fmt: skip


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"ema": EMA()}, r"^ema and swa both decide how weights are averaged \(role AVERAGE\): leave one out$"),
        ({"local_sgd": LocalSGD()}, r"^local_sgd and swa can't run together: .*; leave the average out: local_sgd"),
    ],
)
def test_pairs_that_are_refused(others, message):
    with pytest.raises(ConfigError, match=message):
        arrange({"swa": SWA(), **others}, set())
    with refuses("swa and bf16_weights can't run together", "trainer.master_weights=true"):
        arrange({"swa": SWA()}, {"bf16_weights"})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_average_of_resnet_tiny_reads_the_digits(tmp_path):
    """Better than the weights that it averages, whose rate does not fall. The checkpoint and the export have it too."""
    found = {}
    words = ["recipe=resnet_tiny", "schedule=constant", "trainer.max_epochs=16", "trainer.validate_every=16 epochs"]
    for name, more in {"plain": [], "swa": ["+callbacks=[swa]"]}.items():
        done = run([*words, *more, f"trainer.run_dir=runs/{name}"], tmp_path, timeout_s=280)
        assert done.code == 0, done.err
        found[name] = json.loads(Path("runs", name, "summary.json").read_text())
        print(name, found[name]["val/accuracy"], found[name]["val/loss"])
    assert found["swa"]["val/accuracy"] >= 0.97
    assert found["swa"]["val/loss"] < found["plain"]["val/loss"]
    done = run([found["swa"]["checkpoint"], "--json", "swa.json"], tmp_path, "trainer.tools.evaluate", timeout_s=120)
    assert done.code == 0, done.err
    assert json.loads(Path("swa.json").read_text())["val/loss"] == pytest.approx(found["swa"]["val/loss"], rel=1e-5)
    exported = load_file(found["swa"]["export"] + "/model.safetensors")
    saved = load_file(found["swa"]["checkpoint"] + "/callbacks.safetensors")
    assert all(torch.equal(value, saved[f"swa/average/{name}"]) for name, value in exported.items())
