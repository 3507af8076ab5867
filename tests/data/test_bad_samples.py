"""Samples that can't be read: left out while nothing else moves, written down, and too many of them end the run."""

import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from shard_recipe import Tars, write_points
from support.messages import refuses
from support.quick import quick
from support.ranks import run_ranks
from torch import Tensor
from torch.utils.data import Dataset
from toy_recipe import Points, Toy

from trainer.callback import Callback
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import DataError
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")

BAD = (17, 40, 41)


class Holes(Points):
    def __init__(self, bad: tuple[int, ...], size: int = 96) -> None:
        super().__init__(size, torch.float64)
        self.bad = bad

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if i in self.bad:
            raise DataError(f"{i}.png: is no image")
        return super().__getitem__(i)


class Holed(Toy):
    def __init__(self, bad: tuple[int, ...], where: str = "train") -> None:
        super().__init__(dtype="float64")
        self.bad, self.where = bad, where

    def data(self, split: str) -> Dataset:
        return Holes(self.bad if split == self.where else (), 96 if split == "train" else 13)


class Watch(Callback):
    """Samples, and the reduced gradient, of each step."""

    def __init__(self) -> None:
        self.refs: dict[int, list[tuple[int, ...]]] = {}
        self.gradients: dict[int, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        self.refs[trainer.step] = [tuple(ref) for ref in trainer.data.refs]
        self.gradients[trainer.step] = torch.cat([p.grad.view(-1) for p in trainer.parameters]).clone()  # pyright: ignore


def train(
    place: Place, bad: tuple[int, ...] = BAD, max_steps: int = 8, max_bad: float = 1e-4, resume: str | None = None,
    where: str = "train", micro: int | None = None, name: str = "r", shards: str = "",
) -> Any:  # fmt: skip
    watch, recipe = Watch(), Tars(shards, dtype="float64") if shards else Holed(bad, where)
    trainer = Trainer(
        recipe, {"watch": watch}, lambda groups: torch.optim.SGD(groups, lr=0.0), batch=12, place=place,
        micro_batch=micro,
        data=DataOptions(workers=1 if shards else 0, shuffle_shards=5, shuffle_window=4, max_bad=max_bad),
        options=Options(
            max_steps=max_steps, run_dir=f"runs/{name}", resume=resume, log_every_steps=1,
            checkpoint=CheckpointOptions(every_steps=2, keep=9),
        ),
    )  # fmt: skip
    trainer.fit()
    return watch.refs, watch.gradients, trainer.loop.parts.quarantine.count


def lines(name: str = "r") -> list[dict[str, Any]]:
    path = Path(f"runs/{name}/quarantine.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("world", quick([1, 3, 2], 2))
def test_they_are_left_out_and_nothing_else_moves(world):
    whole = run_ranks(world, train, (), 8, 1e-4, None, "train", None, "whole")
    ranks = run_ranks(world, train)
    noted = lines()
    assert sorted(line["shard"] for line in noted) == list(BAD)
    for line in noted:
        number = line["shard"]
        expected = {"epoch": 0, "shard": number, "offset": 0, "key": str(number), "error": f"{number}.png: is no image"}
        assert {key: value for key, value in line.items() if key != "step"} == expected
    nothing_else_moves(ranks, whole, {line["shard"]: line["step"] for line in noted}, 1)


def test_in_a_folder_whose_name_is_not_utf_8():
    """The log has to name the shard."""
    paths = write_points(Path("data\udcff"), 96, 8, torch.float64)
    train(Place(), (), 1, shards="data\udcff/p-*.tar", name="indexed")
    for path in paths[:2]:
        flip(path, member=3 * 1 + 1, at=512 + 130)
    train(Place(), (), 8, shards="data\udcff/p-*.tar", name="r")
    assert len(lines()) == 2
    assert Path("runs/r/logs/rank0.log").read_text().count("a sample is left out: data?/p-") == 2


def test_bytes_that_have_changed_since_they_were_indexed():
    """Of a payload and of a header, in tars that three ranks' data workers read; their size and time are as before."""
    paths = write_points(Path("data"), 96, 8, torch.float64)
    more = (3, train, (), 8, 1e-4, None, "train", None)
    whole = run_ranks(*more, "whole", "data/p-*.tar")
    flip(paths[2], member=3 * 1 + 1, at=512 + 130)
    flip(paths[5], member=3 * 4, at=2)
    ranks = run_ranks(*more, "r", "data/p-*.tar")
    noted = sorted(lines(), key=lambda line: line["shard"])
    assert [(line["shard"], line["offset"], line["key"]) for line in noted] == [
        (str(paths[2]), 1, "017"), (str(paths[5]), 4, None)
    ]  # fmt: skip
    nothing_else_moves(ranks, whole, {number: line["step"] for number, line in zip((17, 44), noted)}, 8)


def flip(path: Path, member: int, at: int) -> None:
    """A bit of a tar's member, `at` bytes from its header's begin, unnoticed."""
    with tarfile.open(path) as tar:
        begin = tar.getmembers()[member].offset
    before, content = path.stat(), bytearray(path.read_bytes())
    content[begin + at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def nothing_else_moves(ranks: list[Any], whole: list[Any], bad: dict[int, int], per_shard: int) -> None:
    """8 steps of 12 are one epoch of 96. Weights stay as they are, so the gradient is the rest's mean, by hand. `bad`:
    samples that were left out, and in which step."""
    assert [rank[0] for rank in ranks] == [rank[0] for rank in whole]
    assert [rank[2] for rank in ranks] == [len(bad)] * len(ranks)
    torch.manual_seed(0)
    recipe = Toy(dtype="float64")
    model, points = recipe.model(), Points(96, torch.float64)
    for step in range(8):
        numbers = [per_shard * shard + offset for rank in ranks for _, shard, offset in rank[0][step]]
        kept = [points[number] for number in numbers if number not in bad]
        batch = {key: torch.stack([sample[key] for sample in kept]) for key in kept[0]}
        for p in model.parameters():
            p.grad = None
        recipe.loss(model, batch).backward()
        expected = torch.cat([p.grad.view(-1) for p in model.parameters()])  # pyright: ignore
        torch.testing.assert_close(ranks[0][1][step], expected, rtol=1e-12, atol=1e-14)
        assert {bad[number] for number in numbers if number in bad} <= {step + 1}


@pytest.mark.parametrize("first", [False, True])
def test_a_micro_batch_of_nothing_but_bad_ones(first):
    """One sample in a micro-batch: what takes its place has weight 0, also where it is the first of all."""
    refs = run_ranks(3, train, (), 1)[1][0][0]  # of rank 1 in step 0
    bad = (refs[0][1], refs[1][1], BAD[0]) if first else BAD
    ranks = run_ranks(3, train, bad, 8, 1e-4, None, "train", 1, "s")
    assert ranks[0][2] == 3 and len(lines("s")) == 3
    assert all(torch.isfinite(gradient).all() for rank in ranks for gradient in rank[1].values())


def test_a_resume_neither_repeats_nor_loses_a_line():
    train(Place(), max_steps=8)
    once = lines()
    first = min(line["step"] for line in once)
    before = max(step for step in range(0, 9, 2) if step < first) or None
    train(Place(), resume=f"ckpt/r/step-{before:08d}" if before else "ckpt/r/step-00000002")
    assert lines() == once
    train(Place(), max_steps=16, resume="auto")
    again = lines()
    assert again[:3] == once and [line["epoch"] for line in again[3:]] == [1, 1, 1]


def test_too_many_end_the_run_on_all_ranks():
    many = tuple(range(40, 60))
    with pytest.raises(
        AssertionError, match=r"data\.max_bad: 1\d samples of epoch 0 could not be read, and the limit is 10; "
    ):
        run_ranks(3, train, many)


def test_a_share_of_each_epoch():
    """4 epochs of 3 bad ones are no more than one epoch's."""
    train(Place(), max_steps=32)
    assert len(lines()) == 12


def test_none_is_tolerated_where_so_told():
    with refuses("data.max_bad", "1", "0", "0", "17.png", kind=DataError):
        train(Place(), BAD[:1], max_bad=0)


def validate(place: Place, bad: tuple[int, ...], max_bad: float) -> str:
    """What rank 0 says on the way, and all ranks at the end, if it is one."""
    told = ""
    try:
        train(place, bad, 2, max_bad, None, "val", 2)
    except DataError as error:
        told = str(error)
    log = Path("runs/r/logs/rank0.log").read_text() if place.rank == 0 else ""
    return told + "".join(line for line in log.splitlines() if "WARNING" in line)


@pytest.mark.parametrize("world", [1, 3])
def test_the_bad_ones_of_a_validation_are_counted_on_all_ranks(world):
    """13 samples, of which the ranks have 5, 4 and 4: rank 0 has one of the bad ones, or none."""
    for bad in ((3, 6, 12), (11, 12)):
        told = run_ranks(world, validate, bad, 0.1)
        text = f"validation: {len(bad)} of 13 samples were left out; the first: {bad[0]}.png: is no image"
        assert text in told[0] and told[0].count("left out") == 1 and told[1:] == [""] * (world - 1)
        assert lines() == []
        shutil.rmtree("runs"), shutil.rmtree("ckpt")


@pytest.mark.parametrize(("bad", "max_bad", "most"), [(tuple(range(1, 12)), 0.1, 10), ((12,), 0.0, 0)])
def test_too_many_bad_ones_in_a_validation_end_the_run_on_all_ranks(bad, max_bad, most):
    told = run_ranks(3, validate, bad, max_bad)
    text = f"data.max_bad: {len(bad)} of 13 samples of recipe.data('val') could not be read, and the limit is {most}"
    assert all(each.startswith(f"{text}; the first: {bad[0]}.png: is no image") for each in told)


@pytest.mark.parametrize("bad", [(3,), (0, 1), tuple(range(10))])
def test_validation_goes_on_without_them(bad):
    train(Place(), bad, where="val", micro=2)
    kept = [Points(13, torch.float64)[i] for i in range(13) if i not in bad]
    batch = {key: torch.stack([sample[key] for sample in kept]) for key in kept[0]}
    torch.manual_seed(0)
    recipe = Toy(dtype="float64")
    found = json.loads(Path("runs/r/summary.json").read_text())["val/loss"]
    assert found == pytest.approx(recipe.loss(recipe.model(), batch).item(), rel=1e-12)
