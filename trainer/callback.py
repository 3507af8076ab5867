"""What an optimisation may change (wrap_*), what it may watch (on_*), in which order, and with whom."""

from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from trainer.comm.reduce import Reduce
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class Role(IntEnum):
    """Callbacks wrap and run in this order, so the first wrap is the innermost.

    One callback per role, except MODEL, MEASURE and OBSERVE, which take any number.
    """

    MODEL = 0  # changes modules: recompute activations, swap layers
    COMPILE = 1  # torch.compile, outside every change of modules
    SHARD = 2  # DDP's buckets, FSDP
    REDUCE = 3  # flat, hierarchical
    COMPRESS = 4  # bf16, top-k
    SYNC = 5  # every step, every H steps
    OPTIMIZER = 6  # overlap, shard
    AVERAGE = 7  # EMA
    BATCH = 8
    MEASURE = 9  # adds numbers to `trainer.metrics`
    OBSERVE = 10  # shows them, or stops the run


DECIDES = {
    Role.COMPILE: "how the model is compiled",
    Role.SHARD: "how parameters and gradients are laid out",
    Role.REDUCE: "how a bucket is summed",
    Role.COMPRESS: "what is sent",
    Role.SYNC: "when it is sent",
    Role.OPTIMIZER: "what a step does",
    Role.AVERAGE: "what average of the weights there is",
    Role.BATCH: "the next step's batch",
}


class Callback:
    """Base class: every hook is optional, and an unknown hook name is an error when the class is defined."""

    role: ClassVar[Role] = Role.OBSERVE
    also: ClassVar[tuple[Role, ...]] = ()  # roles that it fills beside, so that no other callback may
    exact: bool = True  # training gives the same numbers as without it, to rounding
    communicates: ClassVar[bool] = False  # and does nothing else: with one rank it is idle, and the log says so
    defers: ClassVar[bool] = False  # gradients are not reduced, or not yet, when on_before_optimizer_step runs
    metric: str = ""  # one that validation must give, `val/loss` for example
    # A role, a class of callbacks, or the name of a feature of the trainer (`Plan.features`) -> reason and way out.
    conflicts: Mapping[Any, str] = {}
    requires: "Mapping[type[Callback], str]" = {}

    # Transforms, called once, before training. Each takes the thing and returns the thing.
    def wrap_model(self, trainer: "Trainer", model: nn.Module) -> nn.Module:
        """The module on its device, before DDP. Keep the parameters' names."""
        return model

    def wrap_reduce(self, trainer: "Trainer", reduce: Reduce) -> Reduce:
        """The gradient communication of one bucket: blocking code; called with two ranks or more only."""
        return reduce

    def wrap_optimizer(self, trainer: "Trainer", optimizer: Optimizer) -> Optimizer:
        return optimizer

    # Events.
    def on_fit_start(self, trainer: "Trainer") -> None:
        """State is restored; no step has run."""

    def on_before_optimizer_step(self, trainer: "Trainer") -> None:
        """Gradients are reduced and unscaled, not yet clipped."""

    def on_step_end(self, trainer: "Trainer") -> None:
        """`trainer.step` counts the step; `trainer.metrics` has numbers if it is one to log."""

    def on_flush(self, trainer: "Trainer") -> None:
        """Weights are about to be read: finish deferred work."""

    def on_validation_end(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        """`metrics` are the same on all ranks."""

    def on_fit_end(self, trainer: "Trainer") -> None:
        """Always called, also after an exception: release resources."""

    def state_dict(self) -> dict[str, Any]:
        """What is needed to continue: tensors and JSON values. Keyed by parameter name, never by bucket."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called before `on_fit_start`."""

    def rank_state_dict(self) -> dict[str, Any]:
        """What differs between ranks, saved for each: like `state_dict`. Empty on all ranks or on none."""
        return {}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """What this rank had; at another number of ranks, what `merge_rank_states` makes of all."""

    def merge_rank_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """What every rank starts from, where the checkpoint is of another number of ranks: `states` in their order."""
        raise NotImplementedError

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        unknown = {name for name in vars(cls) if name.startswith(("on_", "wrap_"))} - set(HOOKS)
        if unknown:
            raise TypeError(f"{cls.__name__}: unknown hooks {sorted(unknown)}; the hooks are {', '.join(HOOKS)}")


HOOKS = tuple(name for name in vars(Callback) if name.startswith(("on_", "wrap_")))


def overrides(callback: Callback, hook: str) -> bool:
    return getattr(type(callback), hook) is not getattr(Callback, hook)


def present(key: Role | type[Callback] | str, callbacks: Mapping[str, Callback], features: set[str]) -> list[str]:
    """The names of what `key` means, of those that are there."""
    if isinstance(key, str):
        return [key] if key in features else []
    if isinstance(key, Role):
        return [name for name, callback in callbacks.items() if callback.role == key]
    return [name for name, callback in callbacks.items() if isinstance(callback, key)]


def arrange(callbacks: Mapping[str, Callback], features: set[str]) -> dict[str, Callback]:
    """Sort by role and name, so that the order in the config cannot matter; refuse what cannot work.

    Raises:
        ConfigError: naming every conflict at once.
    """
    ordered = dict(sorted(callbacks.items(), key=lambda item: (item[1].role, item[0])))
    errors: list[str] = []
    owners: dict[Role, str] = {}
    deferring = [name for name, callback in ordered.items() if callback.defers]
    for name, callback in ordered.items():
        for key, why in callback.conflicts.items():
            for other in present(key, ordered, features):
                errors.append(f"{name} and {other} can't run together: {why}")
        for key, why in callback.requires.items():
            if not present(key, ordered, features):
                errors.append(f"{name} needs {key.__name__.lower()}: {why}")
        for role in (callback.role, *callback.also):
            if role in DECIDES and owners.setdefault(role, name) != name:
                told = f"{owners[role]} and {name} both decide {DECIDES[role]}"
                errors.append(f"{told} (role {role.name}): leave one out")
        if deferring and overrides(callback, "on_before_optimizer_step"):
            errors.append(
                f"{name} and {deferring[0]} can't run together: {name} reads gradients before they are reduced; "
                "leave one out"
            )
    if errors:
        raise ConfigError("; ".join(errors))
    return ordered
