"""Initialises a model that was built on the meta device, one module at a time."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from trainer.comm.slices import cut_like, local
from trainer.errors import ConfigError


def on_meta(model: nn.Module) -> list[str]:
    """List the names of the parameters and buffers that have no memory."""
    named = chain(model.named_parameters(), model.named_buffers())
    return [name for name, tensor in named if tensor.is_meta]


def refuse_meta(model: nn.Module) -> None:
    """Raise ConfigError if the model has tensors on the meta device, which most strategies don't initialise."""
    if names := on_meta(model):
        raise ConfigError(
            f"recipe.model(): {names[0]} is on the meta device, and so are {len(names) - 1} more; build the model on "
            "the CPU, or use callbacks.shard.stage=3 on several ranks"
        )


def refuse_without_reset(model: nn.Module) -> None:
    """Raise ConfigError for a module that can't initialise its own tensors."""
    for name, module in model.named_modules():
        if empty(module) and reset_of(module) is None:
            kind = type(module).__name__
            raise ConfigError(
                f"recipe.model(): {name or 'the model'} is on the meta device, and {kind} has no reset_parameters() to "
                f"give {empty(module)[0]} its first value; define it, or build the model on the CPU"
            )


@torch.no_grad()
def initialise(model: nn.Module, source: nn.Module, device: torch.device) -> None:
    """Copy initial values into a model, of which a rank may have only slices.

    Each module of `source`, the same model on the meta device, gets memory on `device`, runs `reset_parameters()`, and
    releases the memory again. So no device holds more than the largest module's own tensors. Tensors that have memory
    keep their values. A shared parameter gets the value of its first module.
    """
    done: set[int] = set()
    for name, module in source.named_modules():
        filled, names = fill(module, device), own(module)
        for key, value in names.items():
            target = getattr(model.get_submodule(name), key)
            if id(target) not in done:
                done.add(id(target))
                local(target.detach()).copy_(cut_like(value.detach(), target, f"{name}.{key}".strip(".")))
        if filled:
            module.to_empty(device="meta", recurse=False)


@torch.no_grad()
def on_host(model: nn.Module) -> nn.Module:
    """Allocate and initialise on the CPU each tensor of the model that has no memory; return the model."""
    refuse_without_reset(model)
    for module in model.modules():
        fill(module, torch.device("cpu"))
    return model


def fill(module: nn.Module, device: torch.device) -> bool:
    """Allocate and initialise a module's own tensors if one of them has no memory; return whether that was so."""
    if not empty(module):
        return False
    kept = {name: tensor for name, tensor in own(module).items() if not tensor.is_meta}
    values = {name: tensor.clone() for name, tensor in kept.items()}
    module.to_empty(device=device, recurse=False)
    reset = reset_of(module)
    assert reset is not None
    reset()
    for name, value in values.items():
        getattr(module, name).copy_(value)
    return True


def own(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def empty(module: nn.Module) -> list[str]:
    """List the names of a module's own tensors that are on the meta device."""
    return [name for name, tensor in own(module).items() if tensor.is_meta]


def reset_of(module: Any) -> Callable[[], Any] | None:
    """Return the method that initialises a module, by the names that torch's modules use."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
