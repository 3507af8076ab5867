"""Checks the optimizer that a user's function has made."""

import inspect
import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainer.annotated import plain
from trainer.errors import ConfigError


def refuse_unusable(made: Any, groups: Iterable[dict[str, Any]]) -> None:
    """Refuse an optimizer with which a run can't train or save. `groups` are what its function was given."""
    if isinstance(made, type) or not hasattr(made, "param_groups") or not callable(getattr(made, "step", None)):
        given = f"the class {made.__name__}" if isinstance(made, type) else "None" if made is None else _kind(made)
        raise ConfigError(f"optimizer: the function returned {given}; return an optimizer, as torch.optim.SGD(params)")
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(type(made).step).parameters.values())[1:]
    if any(p.default is p.empty and p.kind in by_position for p in parameters):
        raise closure_needed(made)
    known = {id(p) for group in groups for p in group["params"]}
    other = next((p for group in made.param_groups for p in group["params"] if id(p) not in known), None)
    if other is not None:
        raise ConfigError(
            f"optimizer: {type(made).__name__} has a tensor of shape {tuple(other.shape)}, which is no parameter of "
            "the model that trains; make the optimizer of the groups that the function is given, and let model() "
            "return a module that has all parameters"
        )
    refuse_state_elsewhere(made)


def rate_of(optimizer: Optimizer, i: int) -> float:
    """Return a group's learning rate, which may also be a zero-dimensional tensor or array."""
    lr = plain(optimizer.param_groups[i].get("lr"))
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not math.isfinite(lr):
        shown = _kind(lr) if isinstance(lr, Tensor) else repr(lr)
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__}.param_groups[{i}]['lr'] is {shown}; give a finite number, as "
            "lr=0.1, on which the schedule puts its factor"
        )
    return float(lr)


def closure_needed(optimizer: Any) -> ConfigError:
    """Return the error for an optimizer whose step evaluates the loss several times, such as LBFGS."""
    return ConfigError(
        f"optimizer: {type(optimizer).__name__}.step() needs a closure, and Echelon computes the gradient of a step "
        "once; choose an optimizer whose step needs none, such as adamw"
    )


def refuse_state_elsewhere(optimizer: Any) -> None:
    """Refuse state that belongs to no parameter, because checkpoints would lack it."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if other := [key for key in optimizer.state if id(key) not in own]:
        shown = _kind(other[0]) if isinstance(other[0], Tensor) else repr(other[0])
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__}.state has {shown}, which is none of its parameters, and "
            "checkpoints have the state of parameters; keep it in state[p] of each parameter p"
        )


def _kind(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"a {type(value).__name__}{shape}"
