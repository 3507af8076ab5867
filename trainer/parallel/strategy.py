"""The layout of a model over the ranks: its contract, and the layout on a single device."""

from collections.abc import Callable
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import clip_grad_norm_, get_total_norm


class Strategy(Protocol):
    """The layout of a model over the ranks, as the step needs it: DDP, sharding or pipelines."""

    model: nn.Module  # called by the recipe's loss
    parameters: list[nn.Parameter]  # this rank's trained parameters, after the model was distributed
    data_rank: int  # this rank among those that read different data
    data_world: int  # the number of such ranks, over which a batch is split
    replicas: ProcessGroup | None  # the ranks that have this one's weights; None: no other has
    lockstep: bool  # forward passes communicate, so every rank makes as many, also in validation
    syncing: bool  # the next backward pass reduces
    constant_buffers: frozenset[str]  # names of those that are equal on all ranks

    def sync_gradients(self, on: bool) -> None:
        """Switch the reduction in the next backward passes on or off. Called when it changes."""
        ...

    def clip(self, max_norm: float | None) -> Tensor:
        """Scale the gradients to a global norm of at most `max_norm`; return the norm before scaling, a scalar."""
        ...

    def warm_up(self, run_pass: Callable[[], None]) -> None:
        """Run discarded passes until the layout of the gradients no longer changes."""
        ...

    def buckets(self) -> list[list[int]]:
        """Return the buckets of the gradients as indices of `parameters`; empty if there are none."""
        ...

    def unwrap(self) -> None:
        """Use the bare model from here on: its backward pass reduces nothing."""
        ...


class SingleDevice:
    """One rank: the model itself."""

    data_rank, data_world, lockstep, syncing = 0, 1, False, True
    replicas: ProcessGroup | None = None
    constant_buffers: frozenset[str] = frozenset()

    def __init__(self, model: nn.Module) -> None:
        self.model, self.parameters = model, trained(model)

    def sync_gradients(self, on: bool) -> None:
        self.syncing = on

    def clip(self, max_norm: float | None) -> Tensor:
        return clip_gradients(self.parameters, max_norm)

    def warm_up(self, run_pass: Callable[[], None]) -> None:
        """Do nothing: there is no layout that changes."""

    def buckets(self) -> list[list[int]]:
        return []

    def unwrap(self) -> None:
        """Do nothing: the model is bare."""


def to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Move the model to the device. A model on the meta device stays: its strategy materialises it."""
    tensors = chain(model.parameters(), model.buffers())
    return model if any(tensor.is_meta for tensor in tensors) else model.to(device)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters that have gradients."""
    return [p for p in model.parameters() if p.requires_grad]


def clip_gradients(parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
    """Clip gradients that this rank has whole; if `max_norm` is None, only measure their norm."""
    if max_norm is not None:
        return clip_grad_norm_(parameters, max_norm)
    return get_total_norm([p.grad for p in parameters if p.grad is not None])
