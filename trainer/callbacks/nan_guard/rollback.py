"""Finds the tensors that a step changes, so that they can be copied and restored."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainer.callback import Role
from trainer.comm.slices import local
from trainer.context import Context


def buffers(trainer: Context) -> list[Tensor]:
    return list(trainer.module.buffers())


def state(trainer: Context) -> Iterator[Tensor]:
    """Yield the tensors that a step changes, including buffers that are not in checkpoints."""
    yield from (local(tensor.detach()) for tensor in (*trainer.parameters, *trainer.module.buffers()))
    for callback in trainer.callbacks.values():
        if callback.role <= Role.AVERAGE:
            yield from tensors({**callback.state_dict(), **callback.rank_state_dict()})
    for values in trainer.optimizer.state.values():
        yield from tensors(values)


def counts(trainer: Context) -> list[tuple[dict[str, Any], str, int | float]]:
    """List the plain numbers in the optimizer's state, such as LAMB's steps: the mapping, its key, the value."""
    states = trainer.optimizer.state.values()
    return [(own, key, value) for own in states for key, value in own.items() if isinstance(value, int | float)]


def copy_into(dst: list[Tensor], src: list[Tensor]) -> None:
    """Copy in place; also empty lists, which torch refuses."""
    if src:
        torch._foreach_copy_(dst, src)


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield local(value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
