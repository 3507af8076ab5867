"""The contract of a callback: its hooks, its role, its conflicts, and the part of the trainer that it may use."""

import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from trainer.annotated import called, check_arguments
from trainer.comm.ranks import Ranks
from trainer.comm.reduce import Reduce
from trainer.config.options import Options
from trainer.data.batch import Split, Step
from trainer.data.loader import Loader
from trainer.forward_backward import ForwardBackward
from trainer.parallel.strategy import Strategy
from trainer.precision import Precision
from trainer.process.heartbeat import Heartbeat
from trainer.process.signals import StopSignals

OWN = re.compile(r"trainer\.(?:callbacks|monitors)\.(\w+)")
WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # where a word of a class name begins

Event = TypeVar("Event", bound=Callable[..., None])
# Returns a JSON value of this rank; makes metrics of all ranks' values.
Gathered = tuple[Callable[[], Any], Callable[[list[Any]], dict[str, float]]]


class PlanProtocol(Protocol):
    """The part of the plan that a callback may read."""

    max_steps: int | None
    accumulate: int  # micro-batches of each rank, without a callback that splits
    epoch_samples: int | None  # None: the data has no epochs
    source: Any  # samples by reference, or an iterable of batches
    order: Any  # of the samples; None: the recipe yields batches
    ahead: int  # steps of this batch that a checkpoint's samples make, less its own steps
    data: Any  # `DataOptions`
    validate_every: Any  # a `Duration`; None: only at the end
    manifest: dict[str, Any]  # of the checkpoint that the run resumes; empty for a new run
    micro: int  # samples of the largest micro-batch, without a callback that splits

    def step_after(self, key: str, given: Any) -> int:
        """Return the step that ends a duration from the run's beginning, such as '2 epochs'."""
        ...

    def samples_at(self, step: int) -> int:
        """Return the samples that the run has trained on after a step."""
        ...

    def features(self) -> set[str]:
        """Return the features of the trainer that are on, as `Callback.conflicts` names them."""
        ...


class TrainerProtocol(Protocol):
    """The public attributes of the trainer. A callback may read them, and set those that say so."""

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
    loader: Loader  # of the data
    ddp: dict[str, Any]  # arguments of DistributedDataParallel; may be changed in `wrap_model`
    heartbeat: Heartbeat  # this rank's signs of life: a callback announces long work
    rehearsing: bool  # the rehearsal runs, whose passes are discarded
    undo: ExitStack  # puts settings of the process back when `fit` ends, or if the run is refused; add yours
    hooks: dict[str, list[Callable[..., Any]]]  # of the callbacks, by name, in their order; a list may be replaced
    # The model and its optimizer, once they are built.
    module: nn.Module  # the recipe's, wrapped by callbacks, without a strategy around it
    eval_model: nn.Module  # the model that is validated and exported; may be set
    global_model: nn.Module  # the model that is saved; may be set
    parameters: list[nn.Parameter]
    optimizer: Any
    new_optimizer: Callable[[nn.Module], Optimizer]  # makes the run's optimizer for the parameters of a module
    scaler: GradScaler
    reduce: Reduce | None  # the chain, if a callback has wrapped the reduction
    # The step.
    data: Step
    losses: list[Tensor]  # of this rank's micro-batches; the last one's graph has run backward
    weight: int  # items of the step, over all ranks
    step: int
    samples: int
    seconds: float
    stop_reason: str  # empty while the run goes on; a hook that hears a signal, on all ranks, may set "signal"
    signals: StopSignals  # its `name` is that of a signal to stop that this rank has received
    lag: int  # steps by which the weights are behind `step`; may be set
    metrics: dict[str, float]  # of this step, if it is logged, else empty; may be added to
    train_loss: Any  # `measure` gives this step's loss over all ranks, and is a collective
    gathered: list[Gathered]  # what the ranks exchange at logged steps; may be added to

    @property
    def plan(self) -> PlanProtocol: ...

    @property
    def strategy(self) -> Strategy: ...

    @property
    def callbacks(self) -> "Mapping[str, Callback]": ...

    @property
    def buckets(self) -> list[list[int]]:
        """The buckets of gradients when the first step began, as indices of `parameters`."""
        ...

    def emit(self, hook: str, *args: Any) -> None:
        """Call this event of all callbacks."""
        ...

    def stop(self, reason: str) -> None:
        """End the run after this step. Call it on all ranks or on none."""
        ...


class Role(IntEnum):
    """The order in which callbacks wrap and run: the first wrap is the innermost.

    MODEL, MEASURE and OBSERVE take any number of callbacks, the other roles one.
    """

    MODEL = 0  # other changes of modules
    SPLIT = 1  # tensor or pipeline parallelism
    RECOMPUTE = 2  # activation checkpointing
    COMPILE = 3  # torch.compile, outside every change of modules
    SHARD = 4  # the layout of parameters and gradients: DDP's buckets, FSDP
    REDUCE = 5  # how a bucket is summed: hierarchical
    COMPRESS = 6  # what is sent: bf16, top-k
    SYNC = 7  # when ranks synchronise: every step, every H steps
    OPTIMIZER = 8  # the optimizer's step: overlap, sharded state
    AVERAGE = 9  # an average of the weights: EMA, SWA
    BATCH = 10  # the split of a step over ranks and micro-batches
    GUARD = 11  # skips steps, or undoes them
    MEASURE = 12  # adds numbers to `trainer.metrics`
    OBSERVE = 13  # shows numbers, or stops the run


UNLOGGED = "on_step_end, not logged"  # of `TrainerProtocol.hooks`: those that follow steps without numbers


def only_logged(on_step_end: Event) -> Event:
    """Mark a hook that acts at logged steps alone, so that no other step pays for the call."""
    on_step_end.only_logged = True  # pyright: ignore[reportFunctionMemberAccess]
    return on_step_end


class Callback:
    """Base class of callbacks. Every hook is optional.

    A misspelt hook is an error when the class is defined. Misspelt are methods on_* and wrap_* that are no hooks, and
    methods that take the trainer and have almost a hook's name. The constructor's arguments are checked against its
    annotations.
    """

    role: ClassVar[Role] = Role.OBSERVE
    also: ClassVar[tuple[Role, ...]] = ()  # further roles that it fills, so no other callback may
    shares_with: frozenset[Role] = frozenset()  # a callback of these may fill this one's role too, and then distributes
    exact: bool = True  # training gives the same numbers as without the callback, to rounding
    communicates: ClassVar[bool] = False  # it only communicates: with one rank it does nothing, and the log says so
    stages: int = 1  # ranks that read the same samples: a batch is split over world / stages
    provides: frozenset[str] = frozenset()  # capabilities that other callbacks refuse or need: docs/step.md has all
    metric: str = ""  # a metric that validation must give, for example `val/loss`
    # A role, a capability, or the name of a feature of the trainer (`Plan.features`) -> reason and way out.
    conflicts: Mapping[Any, str] = {}
    requires: Mapping[str, str] = {}  # a capability -> reason and way out

    # Set-up, in this order; `split` alone is called for each step. Each takes an object and returns one of its kind.
    def build_model(self, trainer: TrainerProtocol, build: Callable[[], nn.Module]) -> nn.Module:
        """Return the result of `build`: the recipe's model, on the CPU. A model on the meta device stays there."""
        return build()

    def wrap_model(self, trainer: TrainerProtocol, model: nn.Module) -> nn.Module:
        """Return the module, which is on its device and not distributed yet. Keep the parameters' names."""
        return model

    def wrap_reduce(self, trainer: TrainerProtocol, reduce: Reduce) -> Reduce:
        """Return the communication of one bucket, which is blocking code. Called only with two ranks or more."""
        return reduce

    def distribute(self, trainer: TrainerProtocol, model: nn.Module) -> Strategy:
        """Return a layout of the model over the ranks instead of DDP. One callback of role SHARD may have this hook.

        Beside a callback of a role in `shares_with`, this one's hook is not called.
        """
        raise NotImplementedError

    def wrap_optimizer(self, trainer: TrainerProtocol, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer of the strategy's parameters."""
        return optimizer

    def wrap_forward_backward(self, trainer: TrainerProtocol, run: ForwardBackward) -> ForwardBackward:
        """Return the forward and backward passes of a step. The passes of the rehearsal go through them, too."""
        return run

    def wrap_batches(self, trainer: TrainerProtocol, steps: Iterator[Step]) -> Iterator[Step]:
        """Return the steps' data, one item a step. Called in `fit`."""
        return steps

    def split(self, trainer: TrainerProtocol, position: int) -> Split:
        """Return the split of the step at this position of the stream of samples. One callback of role BATCH may.

        The split is a pure function, the same on all ranks: loading asks ahead of the step, and a resume asks again.
        """
        raise NotImplementedError

    def rehearse(self, trainer: TrainerProtocol, run_pass: Callable[[Any], None], batch: Any) -> None:
        """Measure discarded passes: `run_pass` runs `forward_backward` on a batch, for example this rank's first.

        Called in `fit`, on every rank.
        """

    # Events.
    def on_fit_start(self, trainer: TrainerProtocol) -> None:
        """Prepare for the first step: state is restored."""

    def on_before_optimizer_step(self, trainer: TrainerProtocol) -> None:
        """Read or change the gradients: they are reduced and unscaled, not yet clipped."""

    def on_step_undone(self, trainer: TrainerProtocol) -> None:
        """Drop state of this step: a guard has dropped the step's gradients."""

    def on_step_end(self, trainer: TrainerProtocol) -> None:
        """Follow a step: `trainer.step` counts it, and `trainer.metrics` has numbers if it is logged.

        Loggers take numbers that a callback adds at logged steps alone.
        Mark the hook `@only_logged` if it does nothing at other steps.
        """

    def on_flush(self, trainer: TrainerProtocol) -> None:
        """Finish deferred work: the weights are about to be read."""

    def on_validation_end(self, trainer: TrainerProtocol, metrics: dict[str, float]) -> None:
        """Take the metrics of a validation, the same on all ranks."""

    def on_media(self, trainer: TrainerProtocol, media: Mapping[str, Any]) -> None:
        """Take texts, images and values for histograms (`trainer.monitors.media.prepared`), on rank 0 alone.

        The recipe's `media` gives them at each validation. A callback may give its own:
        `trainer.emit("on_media", {"generated": text})`.
        """

    def on_event(self, trainer: TrainerProtocol, event: str, facts: dict[str, Any]) -> None:
        """Take what happened beside the steps: `checkpoint` (rank 0 alone), `skip`. `facts` are JSON values."""

    def on_error(self, trainer: TrainerProtocol, error: BaseException) -> None:
        """Add to the error that ends the run, such as a note, before it is reported."""

    def on_fit_end(self, trainer: TrainerProtocol) -> None:
        """Release resources. Always called, also after an exception."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resume needs: tensors and JSON values, keyed by parameter name, never by bucket."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back the state of `state_dict`. Called before `on_fit_start`."""

    def decisions(self) -> dict[str, Any]:
        """Return the JSON values that a resume needs before it loads data. The manifest has them, by callback."""
        return {}

    def has_ended(self, decisions: Any) -> bool:
        """Return whether the run that has made these decisions would end at once. They may be anybody's, or None."""
        return False

    def rank_state_dict(self) -> dict[str, Any]:
        """Return the state that differs between ranks. Empty on all ranks or on none."""
        return {}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Take back this rank's state, or with another number of ranks the merged state."""

    def merge_rank_states(self, states: Iterator[dict[str, Any]]) -> dict[str, Any]:
        """Merge the states of all ranks into one that every rank takes, if the number of ranks differs.

        Each state is read when it is asked for: drop it before the next, for all of them may not fit in memory.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        return called(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        unknown = [name for name, value in vars(cls).items() if name not in HOOKS and is_like_hook(name, value)]
        if unknown:
            raise TypeError(f"{cls.__name__}: unknown hooks {sorted(unknown)}; the hooks are {', '.join(HOOKS)}")
        if "__init__" in vars(cls):
            cls.__init__ = check_arguments(f"callbacks.{name_of_class(cls)}.")(cls.__init__)


def name_of_class(kind: type) -> str:
    """Return the name of Echelon's own callback in the config; another class's name in snake_case."""
    own = OWN.match(kind.__module__)
    return own[1] if own else WORD.sub("_", kind.__name__).lower()


def takes_trainer(name: str, value: object) -> bool:
    """Return whether this is a public method whose first argument is the trainer."""
    if name.startswith("_") or not inspect.isfunction(value):
        return False
    return list(inspect.signature(value).parameters)[1:2] == ["trainer"]


def is_like_hook(name: str, value: object) -> bool:
    """Return whether a name that is no hook's begins as one, or is almost one of a method that takes the trainer."""
    similar = takes_trainer(name, value) and difflib.get_close_matches(name.lower(), HOOKS, cutoff=0.7)
    return bool(similar) or name.startswith(("on_", "wrap_"))


HOOKS = tuple(name for name, value in vars(Callback).items() if takes_trainer(name, value))


def overrides(callback: Callback, hook: str) -> bool:
    """Return whether the callback's class defines this hook."""
    return getattr(type(callback), hook) is not getattr(Callback, hook)


def name_of(callback: Callback, callbacks: Mapping[str, Callback]) -> str:
    """Return the callback's name in the config."""
    return next(name for name, other in callbacks.items() if other is callback)
