"""The micro-batch by memory, whose end a recipe injects: on one rank, in any pass, and the numbers stay."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.steps import Steps, bits, distance
from test_extension_points import Sharded
from torch import Tensor, nn
from torch.utils.data import Dataset, StackDataset
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.auto_batch import AutoBatch
from trainer.callbacks.ema import EMA
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.nan_guard.callback import NanGuard
from trainer.callbacks.shard.callback import Shard
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError, DataError
from trainer.optim.factories import adamw
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.slow  # the contract's rows are in the default run

WORLD, BATCH, STEPS = 3, 36, 8


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class OutOfMemory(torch.autograd.Function):
    """The identity, whose backward pass runs out of memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise torch.OutOfMemoryError("injected")


class Limited(Toy):
    """Runs out of memory above `most` samples, on one rank, from a step on; and counts its passes by size."""

    step = 0

    def __init__(
        self, most: int = 99, on: int = 1, since: int = 0, where: str = "forward", dropout: float = 0.0, pass_: int = 0
    ) -> None:
        super().__init__(dtype="float64", dropout=dropout)
        self.most, self.on, self.since, self.where, self.pass_ = most, on, since, where, pass_
        self.passes: list[tuple[int, int]] = []

    def model(self) -> nn.Module:
        """Has a buffer that changes with each pass, and that DDP shares."""
        model = super().model()
        model.register_buffer("mean", torch.zeros((), dtype=torch.float64))

        def track(module: Any, args: tuple[Tensor]) -> None:
            if module.training and torch.is_grad_enabled():
                module.mean.mul_(0.9).add_(args[0].mean().detach(), alpha=0.1)

        model.register_forward_pre_hook(track)
        return model

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        size = len(batch["x"])
        full = size > self.most and rank() == self.on and self.step >= self.since and torch.is_grad_enabled()
        full &= sum(step == self.step for step, _ in self.passes) >= self.pass_
        self.passes += [(self.step, size)] * torch.is_grad_enabled()
        if full and self.where == "before":
            raise torch.OutOfMemoryError("injected")
        loss = super().loss(model, batch)
        if full and self.where == "forward":
            raise torch.OutOfMemoryError("injected")
        return OutOfMemory.apply(loss) if full and self.where == "backward" else loss  # pyright: ignore[reportReturnType]


def train(
    place: Place, name: str, knobs: dict[str, Any] | None = None, recipe: Limited | None = None,
    resume: str | None = None, run_dir: str = "", micro: int = 6, workers: int = 0, **callbacks: Callback,
) -> dict[str, Any]:  # fmt: skip
    watch, recipe = Steps(), recipe or Limited()
    if knobs is not None:
        callbacks["mine"] = AutoBatch(**knobs)
    trainer = Trainer(
        recipe, {"watch": watch, **callbacks}, adamw, batch=BATCH, micro_batch=micro if place.world > 1 else 3 * micro,
        options=Options(
            max_steps=STEPS, log_every_steps=1, clip_norm=1.0, run_dir=run_dir or f"runs/{name}", resume=resume,
            checkpoint=CheckpointOptions(every_steps=2, keep=9), check_replicas_every=1, timeout_s=30.0,
        ),
        data=DataOptions(workers=workers, shuffle_shards=5, shuffle_window=4),
        place=replace(place, store=f"{place.store}-{name}"),
    )  # fmt: skip
    trainer.fit()
    return {"steps": watch.steps, "passes": recipe.passes, "buffer": trainer.module.mean.item()}  # pyright: ignore


def several(place: Place, cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [train(place, name, **arguments) for name, arguments in cases]


def make_cases() -> list[tuple[str, dict[str, Any]]]:
    none: dict[str, Any] = {"knobs": {}}
    late = {"most": 3, "since": 3, "dropout": 0.1}
    return [
        ("plain", {}),
        ("fits", none),
        ("grows", {"knobs": {"max_micro": 12}, "recipe": Limited(most=8)}),
        ("whole", {"knobs": {"max_micro": 12}}),
        ("starts too large", {"knobs": {}, "recipe": Limited(most=2, on=0)}),
        ("forward", {"knobs": {}, "recipe": Limited(most=3, since=3)}),
        ("backward", {"knobs": {}, "recipe": Limited(most=3, since=3, where="backward")}),
        ("before", {"knobs": {}, "recipe": Limited(most=3, since=3, where="before", on=0)}),
        ("second pass", {"knobs": {}, "recipe": Limited(most=1, since=3, where="backward", on=2, pass_=1)}),
        ("workers", {"knobs": {}, "recipe": Limited(most=3, since=3), "workers": 2}),
        ("dropout", {"knobs": {}, "recipe": Limited(**late)}),
        (
            "repeated",
            {"knobs": {}, "recipe": Limited(dropout=0.1), "resume": "ckpt/dropout/step-00000002",
             "run_dir": "runs/dropout"},
        ),
        (
            "after",
            {"knobs": {}, "recipe": Limited(dropout=0.1), "resume": "ckpt/dropout/step-00000006", "run_dir": "runs/c"},
        ),
        ("bf16", {"grads": GradCompress()}),
        ("bf16 forward", {"knobs": {}, "recipe": Limited(most=3, since=3), "grads": GradCompress()}),
        ("others", {"knobs": {}, "recipe": Limited(most=3, since=3), "ema": EMA(0.5), "guard": NanGuard("rollback")}),
        ("stage 2", {"knobs": {}, "recipe": Limited(most=3, since=3), "shard": Shard(stage=2)}),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("auto"))
        cases = make_cases()
        yield dict(zip([name for name, _ in cases], zip(*run_ranks(WORLD, several, cases), strict=True), strict=True))


def trained_sizes(ranks: Any, number: int) -> list[tuple[int, int]]:
    """(step, size) of the passes of a rank, without those of the rehearsal, which come before step 1."""
    return [one for one in ranks[number]["passes"] if one[0] > 0]


SAME = [
    "fits",
    "grows",
    "whole",
    "starts too large",
    "forward",
    "backward",
    "before",
    "second pass",
    "workers",
    "others",
    "stage 2",
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SAME)
def test_numbers_and_samples_stay(runs, name):
    for step, plain in enumerate(runs["plain"][0]["steps"]):
        assert len(bits(runs[name])[step]) == 1
        for rank, other in zip(runs[name], runs["plain"], strict=True):
            found = rank["steps"][step]
            assert distance(found, plain) < 1e-12 and abs(found["loss"] - plain["loss"]) < 1e-12
            assert sorted(found["refs"]) == sorted(other["steps"][step]["refs"])


def test_a_micro_batch_that_fits_stays(runs):
    """On a CPU, where no limit is looked for. All gradients are reduced after the passes, and have the same bits."""
    assert bits(runs["fits"]) == bits(runs["plain"])
    assert [one["buffer"] for one in runs["fits"]] == [one["buffer"] for one in runs["plain"]]


def test_hooks_that_reduce_take_the_gradients_after_the_passes(runs):
    """Stage 2 of shard has no DDP: its bits and its buffers are those with DDP, though a step is run again."""
    assert bits(runs["stage 2"]) == bits(runs["forward"])
    assert [one["buffer"] for one in runs["stage 2"]] == [one["buffer"] for one in runs["forward"]]


def test_the_search_finds_the_largest_that_fits_on_all_ranks(runs):
    """8 of 12 samples fit on rank 1: two passes of 6 each are as many. Alone, 12 fit."""
    assert json.loads(Path("runs/grows/splits.jsonl").read_text())["micro"] == 8
    assert [step["micros"] for step in runs["grows"][0]["steps"]] == [2] * STEPS
    assert [step["micros"] for step in runs["whole"][0]["steps"]] == [2, 2, *[1] * (STEPS - 2)]
    assert max(size for _, size in trained_sizes(runs["whole"], 2)) == 12


def test_a_micro_batch_of_the_config_that_never_fits(runs):
    """The first steps are loaded before it is known: they are cut in memory."""
    for number in range(WORLD):
        assert {size for _, size in trained_sizes(runs["starts too large"], number)} == {2}
    assert [step["micros"] for step in runs["starts too large"][0]["steps"]] == [2, 2, *[6] * (STEPS - 2)]


@pytest.mark.parametrize("name", ["forward", "backward", "before"])
def test_a_step_that_runs_out_of_memory_is_run_again(runs, name):
    """At step 4, on one rank; all halve. The buffers are those of one run of each step."""
    for number in range(WORLD):
        sizes = trained_sizes(runs[name], number)
        assert {size for step, size in sizes if step < 3} == {6} and {size for step, size in sizes if step > 3} == {3}
        assert [size for step, size in sizes if step == 3][-4:] == [3] * 4
    lines = [json.loads(line) for line in Path(f"runs/{name}/splits.jsonl").read_text().splitlines()]
    assert [(line["micro"], line["samples"]) for line in lines] == [(6, 0), (3, 4 * BATCH)]
    assert [step["micros"] for step in runs[name][0]["steps"]] == [2] * 5 + [4] * 3
    log = Path(f"runs/{name}/logs/rank0.log").read_text()
    assert "auto_batch: step 4: out of memory on 1 of 3 rank(s) with micro-batches of 6 samples; 3 from now on" in log


def test_a_micro_batch_is_halved_as_often_as_it_must(runs):
    """The second pass of a step on rank 2: the first ones have left gradients."""
    lines = [json.loads(line) for line in Path("runs/second pass/splits.jsonl").read_text().splitlines()]
    assert [line["micro"] for line in lines] == [6, 3, 1]


def test_a_resume_repeats_the_bits(runs):
    """Also from before the step that ran out of memory, with dropout, though nothing runs out in the resumed run."""
    assert bits(runs["repeated"]) == bits(runs["dropout"])[2:]
    assert {size for step, size in trained_sizes(runs["repeated"], 1) if step > 3} == {3}
    assert bits(runs["after"]) == bits(runs["dropout"])[6:]
    for rank, straight in zip(runs["repeated"], runs["dropout"], strict=True):
        assert rank["buffer"] == straight["buffer"]  # the failed pass has left nothing in it


def test_a_codec_reduces_the_same_gradients(runs):
    for one, other in zip(runs["bf16 forward"][0]["steps"], runs["bf16"][0]["steps"], strict=True):
        assert abs(one["loss"] - other["loss"]) < 1e-3
    assert all(len(each) == 1 for each in bits(runs["bf16 forward"]))


def test_one_rank_alone(tmp_path):
    plain = train(Place(), "plain", micro=4)
    found = train(Place(), "r", {}, Limited(most=5, on=0, since=3), micro=4)
    assert distance(found["steps"][-1], plain["steps"][-1]) < 1e-12
    assert {size for step, size in found["passes"] if step > 4} == {3}


def test_a_sample_that_never_fits_ends_the_run_with_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"callbacks\.auto_batch: a single sample does not fit into memory"):
        train(Place(), "r", {}, Limited(most=0, on=0), micro=4)
    with pytest.raises(ConfigError, match=r"callbacks\.auto_batch: a single sample does not fit into memory"):
        train(Place(), "later", {}, Limited(most=0, on=0, since=3), micro=4)


class Named(Toy):
    def data(self, split: str) -> Dataset:
        points = super().data(split)
        return StackDataset(point=points, key=[str(i) for i in range(len(points))])  # pyright: ignore

    def weight(self, batch: Any) -> int:
        return super().weight(batch["point"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch["point"])


def test_a_batch_that_can_not_be_cut_is_refused_before_the_first_step(tmp_path):
    trainer = Trainer(
        Named(), {"mine": AutoBatch()}, batch=12, options=Options(max_steps=2), data=DataOptions(workers=0)
    )
    with pytest.raises(DataError, match=r"callbacks\.auto_batch: batch\['key'\]\[0\] is a str, and can't be cut"):
        trainer.fit()
    assert trainer.step == 0


def lockstep(place: Place) -> str:
    try:
        Trainer(Toy(), {"mine": AutoBatch(), "shard": Sharded()}, batch=24, options=Options(max_steps=1), place=place)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_whose_passes_are_in_lockstep_are_refused(tmp_path):
    assert all("leave auto_batch or the sharding out" in message for message in run_ranks(WORLD, lockstep))


def test_a_knob_out_of_range_is_refused():
    with pytest.raises(ConfigError, match=r"callbacks\.auto_batch\.max_micro=0: must be at least 1"):
        AutoBatch(max_micro=0)
