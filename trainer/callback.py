"""The contract of an optimisation: what it may change, what it may watch, in which order, and with whom."""

from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from trainer.comm.ranks import Ranks
from trainer.comm.reduce import Reduce
from trainer.config.options import Options
from trainer.data.batch import Split, Step
from trainer.errors import ConfigError
from trainer.forward_backward import ForwardBackward
from trainer.parallel.strategy import Strategy
from trainer.precision import Precision


class PlanProtocol(Protocol):
    """The part of the plan that a callback may read."""

    max_steps: int | None
    validate_every: Any  # a `Duration`; None: at the end only
    manifest: dict[str, Any]  # of the checkpoint that the run goes on from; empty for a new run


class TrainerProtocol(Protocol):
    """The public surface of the trainer: what a callback may read, and what it may set. All else is the trainer's."""

    # The run.
    recipe: Any
    options: Options
    rank: int
    world: int
    device: torch.device
    ranks: Ranks
    precision: Precision
    run_dir: Path
    batch: int  # samples per optimizer step, over all ranks
    ddp: dict[str, Any]  # arguments of DistributedDataParallel; `wrap_model` may change them
    rehearsing: bool  # passes are discarded
    # The model and its optimizer, once they are built.
    module: nn.Module  # the recipe's, wrapped by callbacks, without a strategy around it
    eval_model: nn.Module  # is validated and exported; may be set
    global_model: nn.Module  # is saved; may be set
    parameters: list[nn.Parameter]
    optimizer: Any
    scaler: GradScaler
    reduce: Reduce | None  # the chain, if a callback has wrapped it
    # The step.
    data: Step
    losses: list[Tensor]  # of this rank's micro-batches, detached
    weight: int  # items of the step, over all ranks
    step: int
    samples: int
    seconds: float
    lag: int  # steps by which the weights are behind; may be set
    metrics: dict[str, float]  # of this step, if it is one to log; may be added to

    @property
    def plan(self) -> PlanProtocol: ...

    @property
    def strategy(self) -> Strategy: ...

    @property
    def callbacks(self) -> "Mapping[str, Callback]": ...

    @property
    def buckets(self) -> list[list[int]]:
        """The layout of the gradients when the first step began, as indices of `parameters`."""
        ...

    def emit(self, hook: str, *args: Any) -> None:
        """Call this event of all callbacks."""
        ...

    def stop(self, reason: str) -> None:
        """End after this step. Call it on all ranks or on none."""
        ...


class Role(IntEnum):
    """Callbacks wrap and run in this order, so the first wrap is the innermost.

    MODEL, MEASURE and OBSERVE take any number of callbacks, the other roles one.
    """

    MODEL = 0  # changes modules in a way that has no role of its own
    QUANTIZE = 1  # lower precision inside modules: FP8, 8-bit
    SPLIT = 2  # tensor or pipeline parallelism
    RECOMPUTE = 3  # activation checkpointing
    COMPILE = 4  # torch.compile, outside every change of modules
    SHARD = 5  # DDP's buckets, FSDP
    REDUCE = 6  # how a bucket is summed: hierarchical
    COMPRESS = 7  # bf16, top-k
    SYNC = 8  # every step, every H steps
    OPTIMIZER = 9  # overlap, sharded optimizer state
    AVERAGE = 10  # EMA
    BATCH = 11  # the split of a step over ranks and micro-batches
    GUARD = 12  # leaves steps out, or undoes them
    MEASURE = 13  # adds numbers to `trainer.metrics`
    OBSERVE = 14  # shows numbers, or stops the run


DECIDES = {
    Role.QUANTIZE: "the precision inside modules",
    Role.SPLIT: "how the model is split",
    Role.RECOMPUTE: "what is recomputed",
    Role.COMPILE: "how the model is compiled",
    Role.SHARD: "how parameters and gradients are laid out",
    Role.REDUCE: "how a bucket is summed",
    Role.COMPRESS: "what is sent",
    Role.SYNC: "when it is sent",
    Role.OPTIMIZER: "what a step does",
    Role.AVERAGE: "what average of the weights there is",
    Role.BATCH: "the next step's batch",
    Role.GUARD: "which steps are undone",
}


class Callback:
    """Base class: every hook is optional, and an unknown hook name is an error when the class is defined."""

    role: ClassVar[Role] = Role.OBSERVE
    also: ClassVar[tuple[Role, ...]] = ()  # roles that it fills beside its own, so no other callback may
    exact: bool = True  # training gives the same numbers as without it, to rounding
    communicates: ClassVar[bool] = False  # and does nothing else: with one rank it is idle, and the log says so
    # Capabilities that others refuse or need. `defers`: gradients are not reduced, or not yet, when
    # on_before_optimizer_step runs. `own_order`: buckets are sent in an order of its own. `hierarchical`: two levels.
    provides: ClassVar[frozenset[str]] = frozenset()
    metric: str = ""  # one that validation must give, `val/loss` for example
    # A role, a capability, or the name of a feature of the trainer (`Plan.features`) -> reason and way out.
    conflicts: Mapping[Any, str] = {}
    requires: Mapping[str, str] = {}  # a capability -> reason and way out

    # Set-up, each called once before training, in this order. Each takes the thing and returns the thing.
    def build_model(self, trainer: TrainerProtocol, build: Callable[[], nn.Module]) -> nn.Module:
        """Return what `build` returns: the recipe's model, on the CPU. A model on the meta device stays there."""
        return build()

    def wrap_model(self, trainer: TrainerProtocol, model: nn.Module) -> nn.Module:
        """Return the module on its device, before it is distributed. Keep the parameters' names."""
        return model

    def wrap_reduce(self, trainer: TrainerProtocol, reduce: Reduce) -> Reduce:
        """Return the communication of one bucket: blocking code. Called with two ranks or more only."""
        return reduce

    def distribute(self, trainer: TrainerProtocol, model: nn.Module) -> Strategy:
        """Return the layout of the model over the ranks, in the place of DDP. One callback of role SHARD may."""
        raise NotImplementedError

    def wrap_optimizer(self, trainer: TrainerProtocol, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer of the strategy's parameters."""
        return optimizer

    def wrap_forward_backward(self, trainer: TrainerProtocol, run: ForwardBackward) -> ForwardBackward:
        """Return the passes of a step. Every rank must wait for the total weight once."""
        return run

    def wrap_batches(self, trainer: TrainerProtocol, steps: Iterator[Step]) -> Iterator[Step]:
        """Return the steps' data, one item a step. Called in `fit`."""
        return steps

    def split(self, trainer: TrainerProtocol, position: int) -> Split:
        """Return the cut of the step that begins at this position of the stream of samples. One of role BATCH may.

        It is the same on all ranks, and a pure function: loading asks ahead of the step, a resume asks again.
        """
        raise NotImplementedError

    def rehearse(self, trainer: TrainerProtocol, run_pass: Callable[[], None]) -> None:
        """Learn from discarded passes: `run_pass` is one forward and backward. Called in `fit`, on every rank."""

    # Events.
    def on_fit_start(self, trainer: TrainerProtocol) -> None:
        """State is restored; no step has run."""

    def on_before_optimizer_step(self, trainer: TrainerProtocol) -> None:
        """Gradients are reduced and unscaled, not yet clipped."""

    def on_step_undone(self, trainer: TrainerProtocol) -> None:
        """Drop the state that was kept of this step: a guard has taken its gradients away."""

    def on_step_end(self, trainer: TrainerProtocol) -> None:
        """`trainer.step` counts the step; `trainer.metrics` has numbers if it is one to log."""

    def on_flush(self, trainer: TrainerProtocol) -> None:
        """Weights are about to be read: finish deferred work."""

    def on_validation_end(self, trainer: TrainerProtocol, metrics: dict[str, float]) -> None:
        """`metrics` are the same on all ranks."""

    def on_fit_end(self, trainer: TrainerProtocol) -> None:
        """Release resources. Always called, also after an exception."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to continue: tensors and JSON values. Keyed by parameter name, never by bucket."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned. Called before `on_fit_start`."""

    def rank_state_dict(self) -> dict[str, Any]:
        """Return what differs between ranks, saved for each. Empty on all ranks or on none."""
        return {}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Take back this rank's state; at another number of ranks, what `merge_rank_states` makes of all."""

    def merge_rank_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what every rank starts from, if the checkpoint is of another number of ranks."""
        raise NotImplementedError

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        unknown = {name for name in vars(cls) if name.startswith(("on_", "wrap_"))} - set(HOOKS)
        if unknown:
            raise TypeError(f"{cls.__name__}: unknown hooks {sorted(unknown)}; the hooks are {', '.join(HOOKS)}")


HOOKS = tuple(
    name
    for name in vars(Callback)
    if name.startswith(("on_", "wrap_")) or name in ("build_model", "distribute", "split", "rehearse")
)


def overrides(callback: Callback, hook: str) -> bool:
    """Tell whether the callback's class has this hook."""
    return getattr(type(callback), hook) is not getattr(Callback, hook)


def present(key: Role | str, callbacks: Mapping[str, Callback], features: set[str]) -> list[str]:
    """Return the names of what `key` means: a feature, the callbacks of a role, or those with a capability."""
    if isinstance(key, Role):
        return [name for name, callback in callbacks.items() if callback.role == key]
    return [key for _ in features & {key}] + [name for name, callback in callbacks.items() if key in callback.provides]


def arrange(callbacks: Mapping[str, Callback], features: set[str]) -> dict[str, Callback]:
    """Sort by role and name, so that the order in the config cannot matter; refuse what cannot work.

    Raises:
        ConfigError: naming every conflict at once.
    """
    ordered = dict(sorted(callbacks.items(), key=lambda item: (item[1].role, item[0])))
    errors: list[str] = []
    owners: dict[Role, str] = {}
    deferring = present("defers", ordered, set())
    for name, callback in ordered.items():
        for key, why in callback.conflicts.items():
            errors += [f"{name} and {other} can't run together: {why}" for other in present(key, ordered, features)]
        for key, why in callback.requires.items():
            if not present(key, ordered, features):
                errors.append(f"{name} needs {key}: {why}")
        for role in (callback.role, *callback.also):
            if role in DECIDES and owners.setdefault(role, name) != name:
                both = f"{owners[role]} and {name} both decide {DECIDES[role]}"
                errors.append(f"{both} (role {role.name}): leave one out")
        if deferring and overrides(callback, "on_before_optimizer_step"):
            errors.append(
                f"{name} and {deferring[0]} can't run together: {name} reads gradients before they are reduced; "
                "leave one out"
            )
    if errors:
        raise ConfigError("; ".join(errors))
    return ordered
