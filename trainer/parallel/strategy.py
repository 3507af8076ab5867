"""The interface of strategies, which lay a model out over the ranks, and the strategy for a single device."""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from trainer.annotated import called
from trainer.checkpoint.parts import read_all
from trainer.checkpoint.serialize import load_optimizer_state
from trainer.comm.slices import local
from trainer.errors import ConfigError, DataError
from trainer.parallel.meta import refuse_meta
from trainer.parallel.sparse import gradients, sparse_weights


class OutputElsewhere(BaseException):
    """Raised by the forward pass on ranks whose stage has no output. Recipes do not catch it."""


class Strategy(Protocol):
    """The layout of a model over the ranks, such as DDP, sharding or a pipeline, as the step uses it."""

    model: nn.Module  # called by the recipe's loss
    parameters: list[nn.Parameter]  # this rank's trained parameters, after the model was distributed
    data_rank: int  # this rank among those that read different data
    data_world: int  # the number of ranks that read different data, over which a batch is split
    replicas: ProcessGroup | None  # the ranks with the same weights as this one; None if there is no other
    whole: bool  # whether each rank has and trains the whole model
    lockstep: bool  # forward passes communicate, so every rank must run equally many, even in validation
    syncing: bool  # whether the next backward pass reduces
    constant_buffers: frozenset[str]  # names of buffers that are equal on all ranks
    owned: Collection[Tensor] | None  # tensors that only this rank of `replicas` steps; None: all; may be set

    @property
    def bucket_bytes(self) -> int:
        """Return the bytes of the buckets that are kept in addition to the gradients."""
        ...

    def sync_gradients(self, on: bool) -> None:
        """Switch the reduction in the following backward passes on or off. Called only on a change."""

    def share_buffers(self) -> None:
        """Broadcast the buffers now, so that passes without a reduction communicate nothing. A collective."""

    def reduce_gradients(self) -> None:
        """Reduce the gradients that passes without a reduction have accumulated. A collective."""

    def clip(self, max_norm: float | None) -> Tensor:
        """Scale the gradients to a global norm of at most `max_norm`; return the norm before scaling, a scalar."""
        ...

    def zero_loss(self, run: Callable[[], Tensor]) -> Tensor:
        """Run a pass without items; return 0.0 with zero gradients, because the loss itself may be NaN."""
        ...

    def copy(self) -> nn.Module:
        """Return a copy of the bare model in this layout, including its hooks. A collective."""
        ...

    def warm_up(self, run_pass: Callable[[], None]) -> None:
        """Run passes, to be discarded, until the layout of the gradients no longer changes."""

    def buckets(self) -> list[list[int]]:
        """Return the buckets of the gradients as indices of `parameters`; empty if there are none."""
        ...

    def unwrap(self) -> None:
        """Use the bare model from now on. Its backward pass reduces nothing."""

    def save(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """Return this rank's part of the checkpoint's sections `model` and `optimizer`. No collective.

        A section has the structure of `Module.state_dict` or `serialize.optimizer_state`, and its tensors are not
        copies. A `Part` represents a slice of a tensor. Exactly one rank returns each slice and each value. All ranks
        return the same sections; rank 0 saves the other sections, whole.
        """
        ...

    def own_part(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Return this rank's part of the callbacks' state, in the form of `save`; None on all ranks if not split."""
        ...

    def load(self, optimizer: Optimizer, sections: Mapping[str, Any]) -> None:
        """Load `model`, and `optimizer` if present, as saved by any strategy on any number of ranks.

        The sections are whole, with a `parts.Stored` for each tensor, of which this rank reads the slice it needs.
        """


class Described:
    """Shows a strategy by its share of the data."""

    def __repr__(self) -> str:
        return called(self, "data_rank", "data_world", "whole")


class SingleDevice(Described):
    """The strategy for one rank: the model itself. `owned` is for strategies that inherit from this one."""

    data_rank, data_world, whole, lockstep, syncing = 0, 1, True, False, True
    replicas: ProcessGroup | None = None
    bucket_bytes = 0
    constant_buffers: frozenset[str] = frozenset()
    owned: Collection[Tensor] | None = None

    def __init__(self, model: nn.Module) -> None:
        refuse_meta(model)
        self.model = self.module = model
        self.parameters = trained(model)

    def sync_gradients(self, on: bool) -> None:
        self.syncing = on

    def share_buffers(self) -> None:
        """Do nothing."""

    def reduce_gradients(self) -> None:
        """Do nothing."""

    def clip(self, max_norm: float | None) -> Tensor:
        return clip_gradients(self.parameters, max_norm)

    def zero_loss(self, run: Callable[[], Tensor]) -> Tensor:
        run()
        return zero_loss(self.parameters, unused=False, sparse=sparse_weights(self.module).values())

    def copy(self) -> nn.Module:
        return copied(self.module)

    def warm_up(self, run_pass: Callable[[], None]) -> None:
        """Do nothing."""

    def buckets(self) -> list[list[int]]:
        return []

    def unwrap(self) -> None:
        """Do nothing."""

    def save(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        return {}

    def own_part(self, state: dict[str, Any]) -> dict[str, Any] | None:
        return None

    def load(self, optimizer: Optimizer, sections: Mapping[str, Any]) -> None:
        self.module.load_state_dict(read_all(sections["model"]))
        if "optimizer" in sections:
            own, states = own_names(self.module, self.owned), sections["optimizer"].items()
            own_states = {name: read_all(state) if name in own else {} for name, state in states}
            load_optimizer_state(optimizer, self.module, own_states)


def to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Move the model to the device. A model on the meta device stays there until its strategy materialises it.

    A buffer whose rows share memory, as after `expand`, is copied, because ranks and averages write into it.
    """
    tensors = chain(model.parameters(), model.buffers())
    if any(tensor.is_meta for tensor in tensors):
        return model
    for module in model.modules():
        shared = [name for name, b in module._buffers.items() if b is not None and has_overlap(b)]
        module._buffers |= {name: module.get_buffer(name).contiguous() for name in shared}
    return model.to(device)


def has_overlap(tensor: Tensor) -> bool:
    """Return whether elements of the tensor share memory, so that torch does not allow writes."""
    return tensor.layout == torch.strided and torch._debug_has_internal_overlap(tensor) == 1


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy of the model. A tensor with a graph, such as `weight` under `weight_norm`, is detached."""
    attributes = [(f"{name}.{key}", value) for name, m in model.named_modules() for key, value in vars(m).items()]
    computed = {id(v): v.detach().clone() for _, v in attributes if isinstance(v, Tensor) and not v.is_leaf}
    try:
        return deepcopy(model, dict[int, Any](computed))
    except (RuntimeError, TypeError) as error:
        name = next((name for name, value in attributes if not can_be_copied(value, computed)), "model")
        why = str(error).split(". ")[0]
        raise ConfigError(
            f"recipe.model(): {name.lstrip('.')} can't be copied for an average of the weights ({why}); keep tensors "
            "by detach(), or leave ema and swa out"
        ) from None


def can_be_copied(value: Any, known: Mapping[int, Any]) -> bool:
    try:
        deepcopy(value, dict(known))
    except (RuntimeError, TypeError):
        return isinstance(value, dict) and any(isinstance(inner, nn.Module) for inner in value.values())
    return True


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def own_names(module: nn.Module, owned: Collection[Tensor] | None) -> set[str]:
    """Return the names of the parameters that this rank steps."""
    return {name for name, p in module.named_parameters() if owned is None or p in owned}


def zero_loss(parameters: Sequence[Tensor], unused: bool, sparse: Collection[Tensor] = ()) -> Tensor:
    """Return 0.0, with a gradient of zero for each parameter, sparse for those in `sparse`.

    If DDP looks for `unused` parameters, no micro-batch can have weight 0, so raise DataError.
    """
    if unused:
        raise DataError(
            "trainer.ddp.find_unused_parameters=true: a micro-batch has weight 0, and DDP would wait for its "
            "parameters; set trainer.ddp.find_unused_parameters=false, or give every micro-batch a weight"
        )
    rows = {id(p): F.embedding(torch.zeros(1, dtype=torch.long, device=p.device), p, sparse=True) for p in sparse}
    return torch.stack([rows.get(id(p), p).sum().float() for p in parameters]).sum() * 0.0


def clip_gradients(parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
    """Clip gradients that this rank has whole; if `max_norm` is None, only measure their norm."""
    found = gradients(parameters)
    norm = get_total_norm(found)
    if max_norm is not None and found:
        torch._foreach_mul_(found, torch.clamp(max_norm / (norm + 1e-6), max=1.0))  # as clip_grad_norm_ does
    return norm


def clip_values(parameters: Sequence[Tensor], most: float) -> None:
    """Clip each element of the gradients, or of this rank's slices of them, to [-most, most] in place."""
    own = [local(gradient) for gradient in gradients(parameters)]
    if own:  # else nan_guard has dropped the step, or no parameter is this rank's
        torch._foreach_clamp_min_(own, -most)
        torch._foreach_clamp_max_(own, most)
