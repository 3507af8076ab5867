"""The rows that a rank has of sharded tensors. They are DTensors, whose module is large and so not imported here."""

from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.parts import Stored, read_all
from trainer.checkpoint.serialize import Part


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, in the same memory; any other tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def is_sharded(value: Any) -> bool:
    """Return whether there is a sharded tensor in `value`, nested dicts of tensors and plain values."""
    return any(map(is_sharded, value.values())) if isinstance(value, dict) else hasattr(value, "to_local")


def span(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first and the last + 1 of a rank's `rows`. Late ranks have fewer rows than the first, or none."""
    count = -(-rows // ranks)  # as torch.chunk has it
    return min(rank * count, rows), min((rank + 1) * count, rows)


def own_span(tensor: Any) -> tuple[int, int]:
    """Return the first and the last + 1 of this rank's rows of a sharded tensor."""
    mesh, (placement,) = tensor.device_mesh, tensor.placements
    if not placement.is_shard(0):
        raise TypeError(f"a tensor of shape {tuple(tensor.shape)} is not sharded by rows, but {placement}")
    return span(tensor.shape[0], mesh.get_local_rank(), mesh.size())


def parts_of(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return what this rank saves of a state, nested dicts of tensors and plain values, that all ranks have.

    Each rank of the group with rank 0 saves its rows of sharded tensors. Rank 0 saves all else.
    """
    parts: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            parts[key] = parts_of(value, rank)
        elif is_sharded(value) and value.device_mesh.mesh[0] == 0:
            parts[key] = Part(local(value.detach()), tuple(value.shape), own_span(value)[0])
        elif rank == 0:
            parts[key] = value
    return parts


def rows_like(like: Any, stored: Any) -> Any:
    """Read stored tensors, of which `stored` may be a nested dict: this rank's rows of those that are like `like`."""
    if isinstance(stored, dict):
        return {key: rows_like(like, value) for key, value in stored.items()}
    if not (is_sharded(like) and isinstance(stored, Stored) and stored.shape == tuple(like.shape)):
        return read_all(stored)
    rows = torch.empty_like(like, dtype=stored.dtype, requires_grad=False)
    local(rows).copy_(stored.read(*own_span(like)))
    return rows
