"""Splits a batch in memory into smaller ones, or repeats its samples to make a larger one."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.data.batch import count_samples
from trainer.data.device_prefetch import map_tensors
from trainer.data.sampling.order import near_equal
from trainer.errors import DataError


def cut_batch(batch: Any, most: int, key: str) -> list[Any]:
    """Split a batch along dimension 0 into the fewest parts of at most `most` samples. The parts are views.

    Args:
        key: The calling callback's key, for errors.
    """
    samples = count_samples(batch)
    parts = -(-samples // most)
    if parts < 2:
        return [batch]
    refuse_uncuttable(batch, samples, key)
    bounds = [near_equal(samples, part, parts) for part in range(parts)]
    return [map_tensors(batch, lambda tensor, rows=slice(*rows): tensor[rows]) for rows in bounds]


def repeat_batch(batch: Any, samples: int, key: str) -> Any:
    """Make a batch of `samples` samples by repeating those of `batch`."""
    count = count_samples(batch)
    refuse_uncuttable(batch, count, key)
    return map_tensors(batch, lambda tensor: tensor[torch.arange(samples, device=tensor.device) % count])


def refuse_uncuttable(batch: Any, samples: int, key: str) -> None:
    """Raise a DataError that names the first part that is not a tensor with one row per sample."""
    for name, leaf in leaves(batch, "batch"):
        if leaf is not None and not (isinstance(leaf, Tensor) and leaf.shape[:1] == (samples,)):
            kind = f"a tensor of shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise DataError(
                f"{key}: {name} is {kind}, and can't be cut into {samples} samples; let recipe.collate "
                f"return tensors with the samples along dimension 0, or leave {key.removeprefix('callbacks.')} out"
            )


def leaves(value: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in leaves(item, f"{name}[{key!r}]")]
    if isinstance(value, list | tuple) and not hasattr(value, "to"):
        return [leaf for i, item in enumerate(value) for leaf in leaves(item, f"{name}[{i}]")]
    if is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "to"):
        return [leaf for f in fields(value) for leaf in leaves(getattr(value, f.name), f"{name}.{f.name}")]
    return [(name, value)]
