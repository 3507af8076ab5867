"""Checkpoints that an earlier version has written load, and go on bit for bit.

`stored/three` (3 ranks, topk and ema) and `stored/one` were written at commit 01e67e0, format 2, and `stored/rows`
(3 ranks, each with rows of the weights) at commit 9466d69f, format 3, by

    PYTHONPATH=tests:tests/toy python tests/checkpoint/test_stored.py NAME ...

with, in `stored/END.json`, what the uninterrupted run had three steps later on that machine.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.ranks import run_ranks
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.ema import EMA
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.shard.callback import Shard
from trainer.checkpoint.serialize import optimizer_state
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.process.environment import Place
from trainer.trainer import Trainer

STORED = Path(__file__).parent / "stored"
WORLDS = {"one": 1, "three": 3, "rows": 3}
FORMATS = {"one": 2, "three": 2, "rows": 3}
STEP, END = 3, 6
Tensors = dict[str, torch.Tensor]


class Losses(Callback):
    """Those of this rank, and a copy of its state at `STEP`."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.state: Tensors = {}

    def on_step_end(self, trainer: Trainer) -> None:
        self.losses += [loss.item() for loss in trainer.losses]
        if trainer.step == STEP:
            self.state = tensors(trainer)


def callbacks_of(name: str) -> dict[str, Callback]:
    if name == "three":
        return {"ema": EMA(0.9), "grad_compress": GradCompress("topk", density=0.1)}
    return {"ema": EMA(0.9), "shard": Shard(3)} if name == "rows" else {}


def train(
    place: Place, name: str, steps: int, resume: str | None, run_dir: str
) -> tuple[Tensors, Tensors, list[float]]:
    """The state at `STEP`, if it came by, the state at the end, and this rank's losses."""
    losses, callbacks = Losses(), callbacks_of(name)
    trainer = Trainer(
        Toy(width=8, depth=1), {**callbacks, "losses": losses}, batch=12, place=place, data=DataOptions(workers=0),
        options=Options(max_steps=steps, run_dir=run_dir, resume=resume, checkpoint=CheckpointOptions()),
    )  # fmt: skip
    trainer.fit()
    return losses.state, tensors(trainer), losses.losses


def tensors(trainer: Trainer) -> Tensors:
    """All that training depends on, by the names that a checkpoint's files give."""
    own = {name: state for name, c in trainer.callbacks.items() if (state := c.rank_state_dict())}
    common = {name: state for name, c in trainer.callbacks.items() if (state := c.state_dict())}
    return flat({
        "model": trainer.module.state_dict(), "optimizer": optimizer_state(trainer.optimizer, trainer.module),
        "callbacks": common, f"rank-{trainer.rank:05d}": own,
    })  # fmt: skip


def flat(value: Any, name: str = "") -> Tensors:
    if isinstance(value, torch.Tensor):
        own: Any = value.detach()
        return {name: (own.to_local() if hasattr(own, "to_local") else own).clone()}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {key: leaf for part, inner in items for key, leaf in flat(inner, f"{name}/{part}".strip("/")).items()}


def digest(state: Tensors) -> str:
    content = b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in sorted(state.items()))
    return hashlib.sha256(content).hexdigest()


def stored(folder: Path, rank: int) -> Tensors:
    """What the files of a checkpoint have for a rank: read without the code under test."""
    sections = ("model", "optimizer", "callbacks", f"rank-{rank:05d}")
    files = {name: folder / f"{name}.safetensors" for name in sections if (folder / f"{name}.safetensors").exists()}
    found = {f"{name}/{key}": tensor for name, file in files.items() for key, tensor in load_file(file).items()}
    if (first := folder / "part-00000.safetensors").exists():  # has what has no rows, for all ranks
        found |= {key: tensor for key, tensor in load_file(first).items() if not tensor.dim()}
        found |= load_file(folder / f"part-{rank:05d}.safetensors")
    return found


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", WORLDS)
def test_a_checkpoint_of_an_older_format_is_taken_back_and_goes_on_bit_for_bit(tmp_path, name):
    world, resume = WORLDS[name], f"ckpt/{name}"
    shutil.copytree(STORED / name, f"ckpt/{name}")
    manifest = json.loads((STORED / name / f"step-{STEP:08d}" / "MANIFEST.json").read_text())
    assert manifest["format"] == FORMATS[name] and bool(manifest["rank_states"]) == (name == "three")
    loaded = run_ranks(world, train, name, STEP, resume, f"runs/{name}")
    for rank, (_, state, losses) in enumerate(loaded):
        assert losses == []
        assert same(state, stored(STORED / name / f"step-{STEP:08d}", rank))
    went_on = run_ranks(world, train, name, END, resume, f"runs/{name}")
    whole = run_ranks(world, train, name, END, None, "runs/whole")
    end = json.loads((STORED / "END.json").read_text())[name]
    for rank in range(world):
        (_, state, losses), (at_step, whole_state, whole_losses) = went_on[rank], whole[rank]
        if same(at_step, loaded[rank][1]):  # this CPU has the bits of the one that wrote it
            assert same(state, whole_state) and losses == whole_losses[-len(losses) :]
            assert (digest(state), losses) == (end[rank]["sha256"], end[rank]["losses"])
        assert losses == pytest.approx(end[rank]["losses"], rel=1e-4)
        assert all(torch.allclose(state[key], whole_state[key], rtol=1e-3, atol=1e-5) for key in state)


def write(folder: Path, names: list[str]) -> None:
    end = json.loads((folder / "END.json").read_text())
    for name in names:
        world = WORLDS[name]
        run_ranks(world, train, name, STEP, None, f"runs/{name}")
        shutil.copytree(f"ckpt/{name}/step-{STEP:08d}", folder / name / f"step-{STEP:08d}", dirs_exist_ok=True)
        ends = run_ranks(world, train, name, END, None, f"runs/whole-{name}")
        went_on = run_ranks(world, train, name, END, f"ckpt/{name}", f"runs/{name}")
        end[name] = []
        for (_, state, losses), (_, again, after) in zip(ends, went_on, strict=True):
            assert same(state, again) and losses[-len(after) :] == after
            end[name].append({"losses": after, "sha256": digest(state)})
    (folder / "END.json").write_text(f"{json.dumps(end, indent=1)}\n")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        write(STORED, sys.argv[1:])
