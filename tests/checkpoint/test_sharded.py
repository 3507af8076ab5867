"""A model of DTensors, cut along any dimension: what 3 ranks save, 1 to 4 ranks load in other layouts, bit for bit."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.states import bits
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim import AdamW

from trainer.checkpoint.parts import open_parts, part_section, read_all
from trainer.checkpoint.serialize import load_optimizer_state, optimizer_state
from trainer.checkpoint.sharded import parts_of, read_like
from trainer.checkpoint.snapshot import Snapshot
from trainer.comm.mesh import forget_groups
from trainer.comm.slices import local
from trainer.errors import ConfigError
from trainer.process.environment import Place

pytestmark = pytest.mark.usefixtures("tmp_path")

SHAPES = {"even": (6, 12), "uneven": (7, 5), "one_row": (1, 8), "one_column": (8, 1), "bias": (7,), "deep": (2, 5, 4)}
# The dimension along which each is cut. Replicated: -1.
ROWS = dict.fromkeys(SHAPES, 0)
COLUMNS = {name: len(shape) - 1 for name, shape in SHAPES.items()}
MIXED = ROWS | {"even": 1, "one_column": 1, "deep": 1, "bias": -1}
LAYOUTS = {"rows": ROWS, "columns": COLUMNS, "mixed": MIXED}


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh, layout: dict[str, int], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            whole, d = torch.randn(shape, generator=generator), layout[name]
            cut = [Replicate()] * (mesh.ndim - 1) + [Shard(d) if d >= 0 else Replicate()]
            self.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, cut)))
        self.register_buffer("count", torch.tensor(3))


def make(place: Place, layout: str, seed: int, copies: int = 1) -> tuple[Model, AdamW]:
    """With a second dimension of the mesh for copies. A group of ranks gets the same model on 1 rank as on 4."""
    store = dist.FileStore(place.store or f"{Path.cwd()}/alone-{seed}-{layout}", place.world)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world)
    shape = (copies, place.world // copies) if copies > 1 else (place.world,)
    model = Model(init_device_mesh("cpu", shape), LAYOUTS[layout], seed)
    return model, AdamW(model.parameters(), lr=0.1)


def end(model: nn.Module) -> None:
    """Leave no group to DTensor's caches, which would keep its threads."""
    for p in model.parameters():
        forget_groups(p.device_mesh)  # pyright: ignore
    dist.destroy_process_group()


def whole(value: Any) -> dict[str, Any]:
    """The bits of nested tensors, gathered from the ranks: a collective."""
    if isinstance(value, dict):
        return {key: whole(inner) for key, inner in value.items()}
    return bits(value.full_tensor() if isinstance(value, DTensor) else value)  # pyright: ignore


def state_of(model: Model, optimizer: AdamW) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer_state(optimizer, model)}


def save(place: Place, layout: str, copies: int) -> dict[str, Any]:
    """Train two steps and save; what all ranks have together."""
    model, optimizer = make(place, layout, 0, copies)
    for step in range(2):
        for p in model.parameters():
            gradient = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            p.grad = distribute_tensor(gradient, p.device_mesh, p.placements)  # pyright: ignore
        optimizer.step()
    state, section = state_of(model, optimizer), part_section(place.rank)
    files = Snapshot().take({section: parts_of(state, place.rank)}, f"{section}.json")
    if place.rank == 0:
        files |= Snapshot().take({"model": {}, "optimizer": {}})
    Path("saved").mkdir(exist_ok=True)
    for name, content in files.items():
        Path("saved", name).write_bytes(content)
    found = whole(state)
    end(model)
    return found


def load(place: Place, layout: str, copies: int, wrote: int) -> tuple[dict[str, Any], list[bool]]:
    """Load into a model of other weights; its state, and whether each slice has its place in the whole."""
    model, optimizer = make(place, layout, 1, copies)
    sections = open_parts(Path("saved"), os.listdir("saved"), wrote)
    own = model.state_dict()
    model.load_state_dict({name: read_like(own[name], part, name) for name, part in sections["model"].items()})
    own = dict(model.named_parameters())
    state = {name: read_like(own[name], part, name) for name, part in sections["optimizer"].items()}
    load_optimizer_state(optimizer, model, state)
    stored = read_all(sections["model"])
    placed = [
        torch.equal(distribute_tensor(stored[name], p.device_mesh, p.placements).to_local(), local(p))  # pyright: ignore
        for name, p in own.items()
    ]
    found = whole(state_of(model, optimizer))
    end(model)
    return found, placed


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [
        (("columns", 3, 1), [("columns", 2, 1), ("columns", 1, 1), ("rows", 2, 1), ("mixed", 3, 1)]),
        (("rows", 3, 1), [("rows", 2, 1), ("rows", 1, 1), ("columns", 4, 2)]),
        (("mixed", 4, 2), [("mixed", 3, 1), ("columns", 1, 1)]),
    ],
)
def test_slices_along_any_dimension_load_on_another_number_of_ranks(wrote, reads):
    layout, world, copies = wrote
    (saved, *others) = run_ranks(world, save, layout, copies)
    assert all(other == saved for other in others) and len(saved["optimizer"]) == len(SHAPES)
    for layout, ranks, copies in reads:
        for found, placed in run_ranks(ranks, load, layout, copies, world):
            assert found == saved and placed == [True] * len(SHAPES)


def test_each_slice_is_saved_once():
    """Not by the second copy, of which the mesh has another line of ranks."""
    run_ranks(4, save, "columns", 2)
    files = [Path("saved", f"part-{rank:05d}.safetensors") for rank in range(4)]
    assert [file.exists() for file in files] == [True, True, False, False]


class Sums(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        whole: Tensor = torch.ones(4, 6)
        self.sums = nn.Parameter(DTensor.from_local(whole, mesh, [Replicate(), Partial()], run_check=False))
        self.twice = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0), Shard(1)]))


def refused(place: Place) -> list[str]:
    store = dist.FileStore(place.store, place.world)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world)
    model = Sums(init_device_mesh("cpu", (2, 2)))
    state, found = model.state_dict(), []
    for name in ("sums", "twice"):
        with pytest.raises(ConfigError) as error:
            parts_of({"model": {"layer": {name: state[name]}}}, place.rank)
        found.append(str(error.value))
        with pytest.raises(ConfigError):
            parts_of({"model": {name: state[name]}}, place.rank)
    end(model)
    return found


def test_what_is_not_in_slices_is_refused_by_name_on_every_rank():
    found = run_ranks(4, refused)
    assert all(messages == found[0] for messages in found)
    for name, message in zip(("sums", "twice"), found[0], strict=True):
        assert message.startswith(f"model/layer/{name}: is laid out over the ranks as (") and "\n" not in message


def test_what_is_not_sharded_is_rank_0s():
    tensor = torch.ones(3)
    state = {"a": {"step": tensor, "n": 1}, "b": [1]}
    assert parts_of(state, 0) == state and parts_of(state, 1) == {"a": {}}
    assert read_like(tensor, state) == state
