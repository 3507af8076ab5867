"""A rank's slice of a sharded tensor (DTensor). The module of DTensor is large, so it is not imported here."""

from typing import Any, NamedTuple

from torch import Tensor

from trainer.errors import ConfigError


class Slice(NamedTuple):
    """Indices `start` to `stop` along one dimension of a tensor. A zero-dimensional tensor has one index."""

    dimension: int
    start: int
    stop: int

    def of(self, whole: Tensor) -> Tensor:
        return whole.narrow(self.dimension, self.start, self.stop - self.start) if whole.dim() else whole


def local(tensor: Tensor) -> Tensor:
    """Return a view of this rank's slice of a sharded tensor; any other tensor unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def is_sharded(value: Any) -> bool:
    """Return whether `value`, nested dicts of tensors and plain values, contains a sharded tensor."""
    return any(map(is_sharded, value.values())) if isinstance(value, dict) else hasattr(value, "to_local")


def span(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the half-open range of a rank's indices. The last ranks may have fewer than the first, or none."""
    count = -(-size // ranks)  # as torch.chunk has it
    return min(rank * count, size), min((rank + 1) * count, size)


def own_slice(tensor: Any, name: str = "") -> Slice:
    """Return this rank's slice of a sharded tensor, or all of a replicated one. `name` is for errors."""
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    cut = [(i, placement) for i, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not cut:
        return Slice(0, 0, shape[0] if shape else 1)
    (i, placement), *others = cut
    if others or not placement.is_shard() or hasattr(placement, "split_factor"):  # a strided one has no slice
        raise ConfigError(
            f"{name or f'a tensor of shape {shape}'}: is laid out over the ranks as {tensor.placements}, and a rank "
            "must have a slice along one dimension; lay it out with one Shard at most, and Replicate"
        )
    dimension = placement.dim % len(shape)
    own = Slice(dimension, *span(shape[dimension], mesh.get_local_rank(i), mesh.size(i)))
    if (found := local(tensor).shape[dimension]) != own.stop - own.start:
        raise ConfigError(
            f"{name or f'a tensor of shape {shape}'}: this rank has {found} of {shape[dimension]} along dimension "
            f"{dimension}, and torch.chunk would give it {own.stop - own.start}; make it by distribute_tensor"
        )
    return own


def cut_like(whole: Tensor, like: Any, name: str = "") -> Tensor:
    """Return a view of the part of `whole` that this rank has of `like`, which may be sharded or not."""
    return own_slice(like, name).of(whole) if is_sharded(like) else whole
