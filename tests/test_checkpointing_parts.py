"""Strategies whose ranks have slices: what one saves, any other resumes, and no rank writes another's state."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.messages import refuses
from support.quick import quick
from support.ranks import run_ranks
from support.runs import make
from torch import Tensor, nn
from torch.optim import Optimizer
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.checkpoint.parts import Stored
from trainer.checkpoint.pretrained import load_weights, weights_files
from trainer.checkpoint.serialize import Part, load_optimizer_state, optimizer_state
from trainer.optim.factories import adamw
from trainer.parallel.ddp import DDP
from trainer.parallel.strategy import Strategy
from trainer.process.environment import Place
from trainer.trainer import Trainer


def slice_of(tensor: Any, dimension: int, rank: int, world: int) -> Part:
    length = tensor.shape[dimension]
    size = -(-length // world)
    start, stop = (min(i * size, length) for i in (rank, rank + 1))
    return Part(tensor.narrow(dimension, start, stop - start), tuple(tensor.shape), start, dimension)


class Slices(DDP):
    """Copies of the model, of which each rank saves and reads its slices, as DTensor would: uneven, or none."""

    last = False  # along the last dimension, as some layers of tensor parallelism are cut; else rows

    def own(self, tensor: Tensor) -> Part:
        return slice_of(tensor, (tensor.dim() - 1) * self.last, self.data_rank, self.data_world)

    def save(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        return {
            "model": self.cut(self.module.state_dict()),
            "optimizer": {name: self.cut(state) for name, state in optimizer_state(optimizer, self.module).items()},
        }

    def cut(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Rank 0 gives what has no dimension."""
        found: dict[str, Any] = {}
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                found[name] = self.own(value.detach())
            elif self.data_rank == 0:
                found[name] = value
        return found

    def load(self, optimizer: Optimizer, sections: Mapping[str, Any]) -> None:
        """Read this rank's slices alone; zeros in the place of the others'. Then sum, as no rank has read all."""
        self.module.load_state_dict({name: self.gathered(value) for name, value in sections["model"].items()})
        states = {
            name: {key: self.gathered(value) for key, value in state.items()}
            for name, state in sections["optimizer"].items()
        }
        load_optimizer_state(optimizer, self.module, states)

    def gathered(self, value: Any) -> Any:
        if not isinstance(value, Stored) or not value.shape:
            return value.read() if isinstance(value, Stored) else value
        whole = torch.zeros(value.shape, dtype=value.dtype)
        part = self.own(whole)
        part.tensor.copy_(value.read(part.dimension, part.start, part.stop))
        torch.distributed.all_reduce(whole)
        return whole


class BySlices(Callback):
    role, communicates = Role.SHARD, True

    def __init__(self, last: bool = False) -> None:
        self.last = last

    def distribute(self, trainer, model: nn.Module) -> Strategy:
        made = Slices(model, trainer.rank, trainer.world, trainer.device, trainer.ddp, None, lambda: trainer.step)
        made.last = self.last
        return made


KINDS: dict[str, Any] = {
    "plain": dict, "rows": lambda: {"shard": BySlices()}, "columns": lambda: {"shard": BySlices(last=True)}
}  # fmt: skip


def train(place: Place, kind: str, run: str, steps: int, resume: str | None) -> dict[str, bytes]:
    trainer = make(
        callbacks=KINDS[kind](), optimizer=adamw, place=replace(place, store=f"{place.store}-{run}-{steps}"),
        max_steps=steps, run_dir=f"runs/{run}", resume=resume, log_every_steps=1,
    )  # fmt: skip
    trainer.fit()
    return bits(trainer)


def bits(trainer: Trainer) -> dict[str, bytes]:
    found = {name: p.detach().numpy().tobytes() for name, p in trainer.module.named_parameters()}
    for name, state in optimizer_state(trainer.optimizer, trainer.module).items():
        found |= {f"{name}/{key}": value.numpy().tobytes() for key, value in state.items()}
    return found


@pytest.fixture
def _folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("wrote", "ranks", "reads", "then"),
    quick(
        [
            ("columns", 3, "columns", 2),
            ("rows", 3, "plain", 2),
            ("columns", 3, "plain", 1),
            ("columns", 3, "rows", 2),
            ("rows", 3, "rows", 3),
            ("plain", 2, "rows", 3),
            ("plain", 2, "columns", 3),
            ("rows", 4, "plain", 1),
        ],
        2,
    ),
)
def test_what_any_layout_wrote_any_other_resumes(_folder, wrote, ranks, reads, then):
    """To the bits of a plain run that goes on in the same way."""
    run_ranks(ranks, train, wrote, "r", 2, None)
    run_ranks(ranks, train, "plain", "p", 2, None)
    found = run_ranks(then, train, reads, "r", 4, "ckpt/r")
    expected = run_ranks(then, train, "plain", "p", 4, "ckpt/p")
    assert found == expected and len(found[0]) == 8 * (1 + 3)  # parameters, each with AdamW's state


def test_each_rank_writes_its_rows_once(_folder):
    run_ranks(3, train, "rows", "r", 2, None)
    run_ranks(3, train, "plain", "p", 2, None)
    folder = Path("ckpt/r/step-00000002")
    state = json.loads((folder / "state.json").read_text())
    assert state["model"] == state["optimizer"] == {}
    assert not (folder / "model.safetensors").exists() and not (folder / "optimizer.safetensors").exists()
    parts = [load_file(folder / f"part-{rank:05d}.safetensors") for rank in range(3)]
    plain = {
        f"{section}/{name}": tensor
        for section in ("model", "optimizer")
        for name, tensor in load_file(f"ckpt/p/step-00000002/{section}.safetensors").items()
    }
    assert sum(t.numel() for part in parts for t in part.values()) == sum(t.numel() for t in plain.values())
    for name, tensor in plain.items():
        cut = [part[name] for part in parts if name in part]
        assert torch.equal(torch.cat(cut) if tensor.dim() else cut[0], tensor)


class Silent(Callback):
    """Counts the collectives of `reserve`, which only some ranks may reach."""

    checkpointer: Any

    def on_step_end(self, trainer) -> None:
        if trainer.rank == 0 and trainer.step == 1:
            self.checkpointer.reserve()
            assert trainer.saver.reserving is not None
            trainer.saver.reserving.result()
            assert trainer.saver.parts.buffers.keys() == {"part-00000"}
            self.reserved = trainer.saver.parts.buffers["part-00000"].bytes.data_ptr()


def reserve(place: Place) -> bool:
    silent = Silent()
    trainer = make(callbacks={"shard": BySlices(), "silent": silent}, optimizer=adamw, place=place, max_steps=3)
    silent.checkpointer = trainer.loop.checkpointer
    trainer.fit()
    return place.rank > 0 or trainer.saver.parts.buffers["part-00000"].bytes.data_ptr() == silent.reserved


def test_memory_is_reserved_without_a_collective_and_used(_folder):
    assert run_ranks(3, reserve) == [True] * 3


def tampered(place: Place) -> str:
    try:
        train(place, "plain", "r", 4, "ckpt/r")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_whose_file_is_missing_is_named(_folder):
    run_ranks(3, train, "rows", "r", 2, None)
    os.remove("ckpt/r/step-00000002/part-00001.json")
    assert "part-00001.json: is missing" in run_ranks(2, tampered)[0]


def test_weights_alone_come_from_the_rows_of_all_ranks(_folder):
    bits = run_ranks(3, train, "rows", "r", 2, None)[0]
    assert [path.name for path in weights_files("ckpt/last.pt")] == ["MANIFEST.json"]
    model = Toy().model()
    load_weights(model, "ckpt/last.pt")
    assert {name: p.detach().numpy().tobytes() for name, p in model.named_parameters()}.items() <= bits.items()
    os.remove("ckpt/r/step-00000002/part-00002.safetensors")
    with refuses("trainer.init_from=ckpt/last.pt", "safetensors", "missing"):
        load_weights(model, "ckpt/last.pt")
