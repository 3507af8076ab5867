"""Slices are cut as torch.chunk cuts them, along any dimension; layouts without slices are refused by name."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from trainer.comm.mesh import forget_groups
from trainer.comm.slices import cut_like, is_sharded, local, own_slice, span
from trainer.errors import ConfigError
from trainer.process.environment import Place


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rows", [1, 2, 5, 12, 17])
def test_slices_are_torchs_chunks(rows, ranks):
    whole = torch.arange(rows)
    chunks = list(whole.chunk(ranks))
    chunks += [whole[:0]] * (ranks - len(chunks))
    found = [whole[slice(*span(rows, rank, ranks))] for rank in range(ranks)]
    assert all(map(torch.equal, found, chunks)) and len(found) == ranks


def test_a_tensor_that_is_not_sharded_is_whole():
    tensor = torch.ones(3)
    assert local(tensor) is tensor and cut_like(tensor, tensor) is tensor
    assert not is_sharded({"a": {"step": tensor, "n": 1}, "b": [1]})


LAYOUTS: list[tuple[tuple[int, ...], list[Any]]] = [
    ((7, 5), [Replicate(), Shard(0)]),
    ((7, 5), [Shard(1), Replicate()]),
    ((2, 1, 7), [Replicate(), Shard(2)]),
    ((2, 1, 7), [Replicate(), Shard(-1)]),
    ((1, 4), [Shard(0), Replicate()]),
    ((4, 1), [Replicate(), Shard(1)]),
    ((0, 4), [Shard(0), Replicate()]),
    ((3,), [Replicate(), Replicate()]),
    ((), [Replicate(), Replicate()]),
]


def slices(place: Place) -> tuple[list[bool], list[str]]:
    """Whether the slices are those that torch has given the ranks, and the messages of what has none."""
    store = dist.FileStore(place.store, place.world)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world)
    mesh, same, messages = init_device_mesh("cpu", (2, place.world // 2)), [], list[str]()
    for shape, placements in LAYOUTS:
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        tensor = distribute_tensor(whole, mesh, placements)
        same.append(torch.equal(cut_like(whole, tensor), local(tensor)))
    whole = torch.ones(4, 6)
    several = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    twice = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
    sums = DTensor.from_local(whole, mesh, [Replicate(), Partial()], run_check=False)
    other = torch.ones(4, 5 if mesh.get_local_rank(1) else 1)  # not as torch.chunk would cut 6 columns
    uneven = DTensor.from_local(
        other, mesh, [Replicate(), Shard(1)], run_check=False, shape=torch.Size((4, 6)), stride=(6, 1)
    )
    for name, tensor in {"a.several": several, "a.twice": twice, "a.sums": sums, "a.uneven": uneven}.items():
        with pytest.raises(ConfigError) as refused:
            own_slice(tensor, name)
        messages.append(str(refused.value))
    forget_groups(mesh)
    dist.destroy_process_group()
    return same, messages


def test_a_rank_has_torchs_slice_along_any_dimension_or_is_refused_by_name():
    for same, (several, twice, sums, uneven) in run_ranks(4, slices):
        assert same == [True] * len(LAYOUTS)
        assert several.startswith("a.several: is laid out over the ranks as (Shard(dim=0), Shard(dim=1)), and a rank ")
        assert twice.startswith("a.twice: is laid out over the ranks as (Shard(dim=0), Shard(dim=0)), and a rank ")
        assert sums.startswith("a.sums: is laid out over the ranks as (Replicate(), Partial(sum)), and a rank ")
        assert uneven.startswith("a.uneven: this rank has ") and "of 6 along dimension 1" in uneven
        assert not any("\n" in message for message in (several, twice, sums, uneven))
