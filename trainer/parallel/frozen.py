"""Follows user code that freezes or unfreezes parameters between steps, as in a bare loop."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainer.errors import ConfigError

TRAINS = attrgetter("requires_grad")
LAID_OUT = ("wrap_reduce", "distribute", "wrap_optimizer", "rehearse")  # hooks that determine at the start what trains


def followed(module: nn.Module, world: int) -> list[nn.Parameter]:
    """Return the parameters to check at each step: all, or on one rank only frozen ones, which may be unfrozen."""
    return [p for p in module.parameters() if world > 1 or not p.requires_grad]


def changed(module: nn.Module, parameters: Sequence[nn.Parameter], before: Sequence[bool]) -> str:
    """Describe the first parameter that was frozen or unfrozen, for an error."""
    names = {p: name for name, p in module.named_parameters()}
    p, trained = next((p, was) for p, was in zip(parameters, before, strict=True) if p.requires_grad != was)
    return f"{names[p]}: was {'frozen' if trained else 'unfrozen'} during the run"


def refuse_fixed(what: str, step: int, callbacks: Mapping[str, Any], hooks: Mapping[str, Sequence[Any]]) -> None:
    """Raise ConfigError if a callback has determined at the start what trains."""
    owners = {name: c for name, c in callbacks.items() if any(getattr(c, hook) in hooks[hook] for hook in LAID_OUT)}
    if owners:
        name = next(iter(owners))
        raise ConfigError(
            f"{what}, at step {step}, and callbacks.{name} has laid out what trains at the start; leave {name} out, or "
            "freeze by recipe.model() for the whole run"
        )


def refuse_unheld(what: str, step: int, module: nn.Module, optimizer: Optimizer) -> None:
    """Raise ConfigError if an unfrozen parameter is not in the optimizer."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if any(p.requires_grad and p not in held for p in module.parameters()):
        raise ConfigError(
            f"{what}, at step {step}, and the optimizer has no frozen parameters; give recipe.parameter_groups() a "
            "group of it with held: True, or freeze it after the start"
        )


def refuse_in_pass(what: str, step: int, world: int) -> None:
    """Raise ConfigError on several ranks, because a pass reduces the gradients that were laid out before it."""
    if world > 1:
        raise ConfigError(
            f"{what}, inside a pass of step {step}, and {world} ranks have agreed before it on what trains; do that "
            "between steps, as in on_train_epoch_start"
        )


def follow(strategy: Any, module: nn.Module, rehearse: Callable[[], None] | None) -> None:
    """Update `strategy.parameters` to what trains now; on several ranks, lay out DDP again."""
    strategy.parameters[:] = [p for p in module.parameters() if p.requires_grad]
    if rehearse:
        strategy.lay_out({})
        rehearse()
