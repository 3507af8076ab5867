"""Pipelines against the same model in one piece: losses and weights bit for bit."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.messages import refuses
from support.pipelines import Fails, same_bits, train, whole
from support.quick import quick
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import default_collate
from toy_recipe import Toy

from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.nan_guard import NanGuard
from trainer.callbacks.pipeline.callback import PipelineParallel
from trainer.checkpoint import commit
from trainer.errors import ConfigError
from trainer.log import log
from trainer.parallel import reducer
from trainer.parallel.reducer import Reducer
from trainer.process.environment import Place


class Ragged(Toy):
    """Some micro-batches lose a sample, as one that can't be read."""

    def collate(self, samples: list[Any]) -> Any:
        keep = len(samples) - int(samples[0]["mask"].sum() == 2)
        return default_collate(samples[:keep])


class Idle(Toy):
    """Some micro-batches have no items."""

    def weight(self, batch: dict[str, Tensor]) -> int:
        return int(batch["mask"].sum()) * int(batch["x"][0, 0] > 0.55)


class Exports(Toy):
    def export(self, model: nn.Module, folder: Path) -> None:
        torch.save(model.state_dict(), folder / "model.pt")


class OutsideNet(nn.Module):
    """A learned number goes to all blocks from outside."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.scale, self.net = nn.Parameter(torch.ones(())), net

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.first(x)
        for block in self.net.blocks:
            x = x + block(x) * self.scale
        return self.net.last(x)


class Outside(Toy):
    def model(self) -> nn.Module:
        return OutsideNet(super().model())


class Sleepy(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        return super().forward(x)


class Slow(Toy):
    """One of six blocks takes as long as many."""

    def model(self) -> nn.Module:
        net: Any = super().model()
        net.blocks[4] = Sleepy(*net.blocks[4])
        return net


class Named(Slow):
    """Its losses have names."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        loss = super().loss(model, batch)
        return {"loss": loss, "twice": 2 * loss.detach()}


class ArgmaxNet(OutsideNet):
    """The blocks pass on a number from before them, in a way that hides NaN."""

    def forward(self, x: Tensor) -> Tensor:
        places = self.net.first(x).argmax(1, keepdim=True)
        x = self.net.first(x)
        for block in self.net.blocks:
            x = x + block(x) * places
        return self.net.last(x)


class Argmax(Toy):
    def model(self) -> nn.Module:
        return ArgmaxNet(super().model())


class Frozen(Toy):
    def model(self) -> nn.Module:
        net = super().model()
        for part in (net.first, *list(net.blocks)[:2]):  # pyright: ignore
            part.requires_grad_(False)
        return net


class Grouped(Toy):
    """The recipe's group is of the last rank's block, and is told from others by what trains."""

    def parameter_groups(self, model: Any) -> list[dict[str, Any]]:
        return [{"params": [p for p in model.blocks[4].parameters() if p.requires_grad], "lr_scale": 3.0}]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


CASES: list[tuple[str, int, list[int] | str]] = [
    ("gpipe", 2, "auto"),
    ("1f1b", 3, [1, 5]),
    ("interleaved", 2, [1, 2, 5]),
    ("zero_bubble", 3, "auto"),
    ("zbv", 3, "auto"),
]


@pytest.mark.parametrize(("schedule", "stages", "cut"), quick(CASES, 2))
def test_weights_and_losses_are_those_of_the_unsplit_model(here, schedule, stages, cut):
    (alone,) = run_ranks(1, train, None)
    ranks = run_ranks(stages, train, {"stages": stages, "schedule": schedule, "cut": cut})
    same_bits(ranks, alone)


@pytest.mark.parametrize(
    ("schedule", "recipe"),
    [
        ("1f1b", Toy),
        pytest.param("zbv", Toy, marks=pytest.mark.slow),
        pytest.param("interleaved", Idle, marks=pytest.mark.slow),
        pytest.param("1f1b", Idle, marks=pytest.mark.slow),
    ],
)
def test_two_pipelines_are_two_ranks_of_ddp(here, schedule, recipe):
    """A sum of two is the same in either order, so the bits are."""
    run = {"batch": 24, "accumulate": 4, "recipe": recipe}
    alone = run_ranks(2, train, None, run)
    ranks = run_ranks(4, train, {"schedule": schedule}, run)
    for replica in (0, 1):
        own = ranks[replica::2]  # rank = stage * replicas + replica
        found = whole(own)
        for name, value in alone[replica]["weights"].items():
            assert (found[name] == value).all(), name
        assert [rank["losses"] for rank in own] == [alone[replica]["losses"]] * 2
    for rank in ranks:
        assert rank["validation"]["val/loss"] == pytest.approx(alone[0]["validation"]["val/loss"], rel=1e-6)


def beside(place: Place, knobs: dict[str, Any], most: int) -> dict[str, Any]:
    """With the buckets that are on their way when the last backward pass has ended, and all, of each step."""
    counts: list[tuple[int, int]] = []
    finish = Reducer.finish

    def look(own: Reducer) -> None:
        counts.append((len(own.sent), len(own.buckets)))
        finish(own)

    with mock.patch.object(reducer, "BUCKET_BYTES", most), mock.patch.object(Reducer, "finish", look):
        return {**train(place, knobs, {"batch": 24, "accumulate": 3}), "counts": counts}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "early"),
    [
        ("1f1b", 8),
        ("interleaved", 8),
        ("zbv", 0),
    ],
)
def test_gradients_are_reduced_beside_the_last_backward_passes(here, schedule, early):
    """Small buckets change no bits. Schedules that compute the gradients of weights apart reduce them at last."""
    knobs = {"schedule": schedule, "cut": [3] if schedule == "1f1b" else [1, 3, 5]}
    one, many = (run_ranks(4, beside, knobs, most) for most in (1 << 20, 64))
    for rank, other in zip(one, many, strict=True):
        assert set(rank["counts"]) == {(min(early, 1), 1)}
        assert set(other["counts"]) == {(early, 8)}
        assert rank["losses"] == other["losses"]
        assert all((other["weights"][name] == value).all() for name, value in rank["weights"].items())


@pytest.mark.slow
def test_dropout_is_keyed_by_step_micro_batch_and_block(here):
    """So it doesn't depend on the cut or the schedule, and a run can be repeated."""
    run = {"dropout": 0.3}
    plans: list[dict[str, Any]] = [
        {"stages": 3, "cut": [1, 2]},
        {"stages": 3, "schedule": "gpipe"},
        {"schedule": "zbv"},
    ]
    first, *others = [run_ranks(plan.get("stages", 2), train, plan, run) for plan in plans]
    for other in others:
        assert other[0]["losses"] == first[0]["losses"]
        assert all((whole(other)[name] == value).all() for name, value in whole(first).items())
    losses = first[0]["losses"][:6]
    assert len(set(losses)) == 6 and losses != run_ranks(3, train, plans[0])[0]["losses"][:6]


def test_a_run_resumes_bit_for_bit_in_stages_and_in_one_piece(here):
    """A pipeline's checkpoint loads into the unsplit model, and the reverse."""
    six = {"steps": 6}
    (alone,) = run_ranks(1, train, None, six)
    (half,) = run_ranks(1, train, None)
    staged = run_ranks(3, train, {"stages": 3})
    saved = {rank["saved"] for rank in staged if rank["saved"] != "None"}.pop()
    same_end(run_ranks(1, train, None, {**six, "resume": saved}), alone)
    same_end(run_ranks(2, train, {"schedule": "zbv"}, {**six, "resume": saved}), alone)
    same_end(run_ranks(3, train, {"stages": 3, "cut": [1, 5]}, {**six, "resume": half["saved"]}), alone)


def same_end(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    found = whole(ranks)
    assert found.keys() == alone["weights"].keys()
    assert all((found[name] == value).all() for name, value in alone["weights"].items())
    for rank in ranks:
        assert rank["losses"] == alone["losses"][-len(rank["losses"]) :]
        assert rank["validation"] == alone["validation"]


@pytest.mark.slow
def test_a_run_with_dropout_resumes_bit_for_bit(here):
    run = {"dropout": 0.3}
    straight = run_ranks(4, train, {}, {**run, "steps": 6})
    first = run_ranks(4, train, {}, run)
    resumed = run_ranks(4, train, {}, {**run, "steps": 6, "resume": first[0]["saved"]})
    for rank, other in zip(resumed, straight, strict=True):
        assert rank["losses"] == other["losses"][len(first[0]["losses"]) :]
    ends = [{name: w for rank in ranks for name, w in rank["weights"].items()} for ranks in (resumed, straight)]
    assert ends[0].keys() == ends[1].keys()  # each run has measured its own cut
    assert all((ends[0][name] == value).all() for name, value in ends[1].items())


GROUPS = [
    {"match": "first.*", "lr_scale": 0.1},
    {"match": "blocks.1.*", "weight_decay": 0.5},
    {"match": ["last.bias", "blocks.0.0.bias"], "freeze": True},
    {"match": "last.*", "lr": 0.03},
]


def test_settings_of_some_parameters_are_those_of_the_unsplit_model(here):
    """Each group but one is of parameters that only one of the ranks has."""
    run = {"recipe": Grouped, "groups": GROUPS}
    (alone,) = run_ranks(1, train, None, run)
    plain = run_ranks(1, train, None)[0]["weights"]
    assert plain.keys() - alone["weights"].keys() == {"last.bias", "blocks.0.0.bias"}
    assert not (alone["weights"]["blocks.4.0.weight"] == plain["blocks.4.0.weight"]).any()
    same_bits(run_ranks(2, train, {"stages": 2, "cut": [3]}, run), alone)


def test_a_stage_that_a_group_freezes_is_refused(here):
    run = {"groups": [{"match": ["first.*", "blocks.[0-2].*"], "freeze": True}]}
    for text in run_ranks(2, refused, {"stages": 2, "cut": [3]}, run):
        assert "stage 0 has no parameter that trains" in text


def test_gloo_between_gpus_is_refused():
    trainer = SimpleNamespace(device=torch.device("cuda"), ranks=SimpleNamespace(backend="gloo"))
    with refuses("trainer.backend=gloo", "GPU"):
        PipelineParallel(stages=2).build_model(trainer, nn.Identity)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_micro_batches_of_other_sizes_are_padded_on_their_way(here):
    """A sample is left out of some: the numbers stay the unsplit model's."""
    run = {"recipe": Ragged, "accumulate": 3}
    (alone,) = run_ranks(1, train, None, run)
    assert alone["losses"] != run_ranks(1, train, None, {"accumulate": 3})[0]["losses"]
    same_bits(run_ranks(3, train, {"stages": 3}, run), alone)


@pytest.mark.slow
def test_an_export_and_other_runs_weights_are_whole(here):
    run_ranks(3, train, {"stages": 3}, {"recipe": Exports})
    (file,) = Path("runs").glob("*/export/model.pt")
    exported = torch.load(file)
    (alone,) = run_ranks(1, train, None)
    assert all((exported[name].numpy() == value).all() for name, value in alone["weights"].items())
    (checkpoint,) = Path("ckpt").glob("*/step-00000003/part-00002.json")
    from_parts = run_ranks(1, train, None, {"init_from": str(checkpoint.parent)})
    from_file = run_ranks(2, train, {}, {"init_from": str(file)})
    same_bits(from_file, from_parts[0])


def without_room(place: Place, steps: int) -> tuple[str, list[str]]:
    """The error of a run whose last checkpoint fails, and the lines about its export."""
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        real = commit.stage

        def stage(folder: Path, step: int, *args: Any) -> Any:
            if step == steps:
                raise OSError(28, "No space left on device")
            return real(folder, step, *args)

        patch.setattr(commit, "stage", stage)
        patch.setattr(log, "info", lambda form, *values: messages.append(form % values))
        with pytest.raises(ConfigError) as error:
            train(place, {"cut": [3]}, {"recipe": Exports, "steps": steps})
    return str(error.value), [line for line in messages if "export" in line]


@pytest.mark.parametrize("steps", [1, 4])
def test_without_the_last_checkpoint_nothing_is_exported(here, steps):
    """A checkpoint of step 3 is there, or none; the disk's error ends the run, on each rank with the same line."""
    (error, told), (other, _) = run_ranks(2, without_room, steps)
    assert other == error
    assert error.startswith("trainer.checkpoint.dir=ckpt: ") and "No space left on device" in error
    assert not list(Path("runs").glob("*/export"))
    assert [line.partition(" -m ")[0].split()[:2] for line in told] == ([["export", "with"]] if steps > 3 else [])
    assert all("step-00000003" in line for line in told)


@pytest.mark.slow
def test_codecs_and_guards_see_what_they_see_in_ddp(here):
    """Two replicas of each stage send bfloat16; a cast is the same in buckets of any size."""
    run = {"batch": 24, "accumulate": 3, "others": {"grad_compress": GradCompress, "nan_guard": Rollback}}
    alone = run_ranks(2, train, None, run)
    ranks = run_ranks(4, train, {}, run)
    found = whole(ranks[::2])
    assert all((found[name] == value).all() for name, value in alone[0]["weights"].items())
    plain = run_ranks(2, train, None, {**run, "others": {}})
    assert any((found[name] != value).any() for name, value in plain[0]["weights"].items())


def Rollback() -> NanGuard:
    return NanGuard("rollback", every=1)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [Slow, Named])
def test_the_cut_is_by_time_and_a_resume_keeps_it(recipe, here):
    """The slow block is alone in its stage."""
    ranks = run_ranks(3, train, {"stages": 3}, {"recipe": recipe})
    assert [rank["starts"] for rank in ranks] == [[0, 4, 5]] * 3
    resumed = run_ranks(3, train, {"stages": 3}, {"recipe": recipe, "steps": 4, "resume": ranks[0]["saved"]})
    assert [rank["starts"] for rank in resumed] == [[0, 4, 5]] * 3


def fails(place: Place) -> str:
    try:
        train(place, {"stages": 3}, {"recipe": Fails if place.rank == 2 else Toy})
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


def test_a_rank_that_fails_ends_the_others(here):
    *others, own = run_ranks(3, fails)
    assert own == "ValueError: broken on purpose"
    assert all(error.startswith(("DistBackendError", "RuntimeError", "DistNetworkError")) for error in others), others


def refused(place: Place, knobs: dict[str, Any], run: dict[str, Any]) -> str:
    try:
        train(place, knobs, run)
    except ConfigError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("knobs", "run", "message"),
    [
        ({"stages": 2}, {}, "callbacks.pipeline.stages=2: does not divide 3 rank(s); use 3"),
        ({"stages": 3}, {"depth": 2}, "callbacks.pipeline.stages: 3 stages"),
        ({"stages": 3}, {"accumulate": 2}, "callbacks.pipeline.schedule=1f1b: needs accumulate=3 or more for 3 stages"),
        ({"stages": 3, "cut": [2, 2]}, {}, "callbacks.pipeline.cut=[2, 2]: must be 2 rising numbers from 1 to 5"),
        ({"stages": 3, "cut": [2]}, {}, "callbacks.pipeline.cut=[2]: must be 2 rising numbers"),
        ({"stages": 3, "cut": [0, 3]}, {}, "callbacks.pipeline.cut=[0, 3]: must be 2 rising numbers"),
        ({"stages": 3, "cut": [2, 4]}, {"recipe": Frozen}, "callbacks.pipeline: stage 0 has no parameter that trains"),
        ({"stages": 3}, {"recipe": Outside}, "callbacks.pipeline: the loss of the first micro-batch is not finite"),
        ({"stages": 3}, {"recipe": Argmax}, "in one piece, so something passes by the blocks"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(here, knobs, run, message):
    assert all(message in error for error in run_ranks(3, refused, knobs, run))
