"""Selects the slices of sharded tensors that a rank saves, and reads its slices of stored tensors."""

from typing import Any

import torch

from trainer.checkpoint.parts import Stored, read_all
from trainer.checkpoint.serialize import Part
from trainer.comm.slices import is_sharded, local, own_slice


def parts_of(state: dict[str, Any], rank: int, path: str = "") -> dict[str, Any]:
    """Return this rank's share of a state, nested dicts of tensors and plain values, that all ranks have.

    The ranks in rank 0's mesh save their slices of sharded tensors; the first of several copies is saved. Rank 0 saves
    everything else. A tensor that is sliced along several dimensions raises ConfigError.
    """
    parts: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{path}/{key}".strip("/")
        if isinstance(value, dict):
            parts[key] = parts_of(value, rank, name)
        elif is_sharded(value):
            own = own_slice(value, name)  # on every rank, so that all of them raise
            if has_first_copy(value):
                tensor, copies = local(value.detach()), all(p.is_replicate() for p in value.placements)
                parts[key] = tensor if copies else Part(tensor, tuple(value.shape), own.start, own.dimension)
        elif rank == 0:
            parts[key] = value
    return parts


def has_first_copy(tensor: Any) -> bool:
    """Return whether this rank is in the same mesh as rank 0, and is the first of the ranks with its slice."""
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None or mesh.mesh.flatten()[0] != 0:
        return False
    return not any(i for i, placement in zip(place, tensor.placements, strict=True) if placement.is_replicate())


def read_like(like: Any, stored: Any, name: str = "") -> Any:
    """Read stored tensors, or nested dicts of them: only this rank's slice if `like` is sharded."""
    if isinstance(stored, dict):
        return {key: read_like(like, value, name) for key, value in stored.items()}
    if not (is_sharded(like) and isinstance(stored, Stored) and stored.shape == tuple(like.shape)):
        return read_all(stored)
    own = torch.empty_like(like, dtype=stored.dtype, requires_grad=False)
    local(own).copy_(stored.read(*own_slice(like, name)))
    return own
