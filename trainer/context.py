"""A run as its callbacks see it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from trainer.checkpoint.saver import Saver
from trainer.comm.ranks import Ranks
from trainer.comm.reduce import Reduce
from trainer.config.duration import Periods
from trainer.config.options import DataOptions, Options
from trainer.data.batch import Step
from trainer.data.loader import Loader
from trainer.parallel.strategy import Strategy
from trainer.precision import Precision
from trainer.process.environment import Place
from trainer.process.heartbeat import Heartbeat
from trainer.process.signals import StopSignals
from trainer.state import TrainingState

# Returns a JSON value of this rank; makes metrics of all ranks' values.
Gathered = tuple[Callable[[], Any], Callable[[list[Any]], dict[str, float]]]


class PlanProtocol(Protocol):
    """The part of the plan that a callback may read."""

    max_steps: int | None
    accumulate: int  # micro-batches of each rank, without a callback that splits
    batch: int  # samples per optimizer step, over all ranks
    epoch_samples: int | None  # None: the data has no epochs
    source: Any  # samples by reference, or an iterable of batches
    order: Any  # of the samples; None: the recipe yields batches
    ahead: int  # steps of this batch that a checkpoint's samples make, less its own steps
    data: Any  # `DataOptions`
    validate_every: Any  # a `Duration`; None: only at the end
    resumed: Path | None  # the checkpoint that the run resumes
    manifest: dict[str, Any]  # of that checkpoint; empty for a new run
    micro: int  # samples of the largest micro-batch, without a callback that splits

    def step_after(self, key: str, given: Any) -> int:
        """Return the step that ends a duration from the run's beginning, such as '2 epochs'."""
        ...

    def step_at(self, samples: Fraction) -> int:
        """Return the first step after which the run has trained on so many samples."""
        ...

    def periods(self, key: str, given: Any, start: int | Fraction = 0) -> Periods:
        """Return the periods of a duration, which count steps, or else the samples trained on."""
        ...

    def samples_at(self, step: int) -> int:
        """Return the samples that the run has trained on after a step."""
        ...

    def features(self) -> set[str]:
        """Return the features of the trainer that are on, as `Callback.conflicts` names them."""
        ...


@dataclass
class Command:
    """The part of a run that only the command line gives.

    Attributes:
        argv: The arguments, for the command that resumes; None: the run was made in Python.
        spec: A `RunSpec`, the decisions of a launcher; None: rank 0 decides.
        settings: The config, flat and without secrets, which all ranks must share.
        machine: Properties of this machine that change bits, for the manifest.
        on_accepted: Called on rank 0 with the run's folder, once nothing can refuse the run.
        on_error: Called with the error of a failed run, before the clean-up.
        end_failed: Called then, if the device has failed, to end the process.
    """

    argv: Sequence[str] | None = None
    spec: Any = None
    settings: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    on_accepted: Callable[[Path], Any] = lambda run_dir: None
    on_error: Callable[[BaseException], Any] = lambda error: None
    end_failed: Callable[[BaseException], Any] = lambda error: None


@dataclass(frozen=True)
class RunArguments:
    """The arguments of a run, as `Trainer` takes them, with their defaults."""

    recipe: Any
    callbacks: Mapping[str, Any]
    optimizer: Callable[..., Optimizer]
    schedule: Any
    batch: int
    micro_batch: int | None
    accumulate: int | None
    options: Options
    data: DataOptions
    place: Place
    name: str
    command: Command


def of(path: str) -> Any:
    """Return an attribute that is one of a part of the object. Reading it makes no Python call."""
    return property(attrgetter(path))


class Context:
    """A run as its callbacks see it, which they get as `trainer`.

    A callback may read every attribute, and set those that say so. An attribute exists from the moment in set-up in
    which its object is built: docs/step.md has the order.
    """

    # The run.
    recipe: Any
    name: str
    command: Command
    options: Options
    plan: PlanProtocol
    state: TrainingState
    rank: int
    world: int
    device: torch.device
    ranks: Ranks
    precision: Precision
    run_dir: Path
    batch: int  # samples per optimizer step, over all ranks
    saver: Saver  # writes the checkpoints
    loader: Loader  # of the data
    ddp: dict[str, Any]  # arguments of DistributedDataParallel; may be changed in `wrap_model`
    heartbeat: Heartbeat  # this rank's signs of life: a callback announces long work
    undo: ExitStack  # puts settings of the process back when `fit` ends, or if the run is refused; add yours
    callbacks: Mapping[str, Any]  # name -> `Callback`, in their order
    hooks: Any  # `Hooks`: name -> methods of the callbacks, in their order; a list may be replaced
    ended: str  # why the run that is resumed has nothing left to do; empty if it trains
    rehearsing = False  # the rehearsal runs, whose passes are discarded
    fitted = False  # `fit` was called
    accepted = False  # nothing can refuse the run any more
    closed = False  # `fit` has returned
    # The model and its optimizer, once they are built.
    module: nn.Module  # the recipe's, wrapped by callbacks, without a strategy around it
    eval_model: nn.Module  # the model that is validated and exported; may be set
    global_model: nn.Module  # the model that is saved; may be set
    strategy: Strategy
    loss: Any  # `CheckedLoss`: the recipe's loss, in the run's precision
    parameters: list[nn.Parameter]
    optimizer: Any
    new_optimizer: Callable[[nn.Module], Optimizer]  # makes the run's optimizer for the parameters of a module
    scaler: GradScaler
    reduce: Reduce | None = None  # the chain, if a callback has wrapped the reduction
    buckets: list[list[int]]  # of gradients when the first step began, as indices of `parameters`
    # The step.
    data: Step
    losses: list[Tensor]  # of this rank's micro-batches; the last one's graph has run backward
    grad_norm: Tensor  # before clipping, of the last step that was logged or clipped
    stop_reason = ""  # a hook that hears a signal, on all ranks, may set "signal"
    signals: StopSignals  # its `name` is that of a signal to stop that this rank has received
    metrics: dict[str, float]  # of this step, if it is logged, else empty; may be added to
    last_metrics: dict[str, float]  # of the last logged step
    train_loss: Any  # `TrainLoss`: `measure` gives this step's loss over all ranks, and is a collective
    gathered: list[Gathered]  # what the ranks exchange at logged steps; may be added to
    agreement: Any  # `StepAgreement`
    summary: dict[str, Any]  # of the finished run, on rank 0
    evaluate: Callable[..., dict[str, float]]  # as `Trainer.evaluate`
    predict: Callable[..., Any]  # as `Trainer.predict`
    validate: Callable[[], bool]  # validates now; returns whether `keep_best` wants a checkpoint; a collective
    step: int = of("state.step")
    samples: int = of("state.samples")
    seconds: float = of("state.seconds")
    validation: dict[str, float] = of("state.validation")
    validated_step: int = of("state.validated_step")
    best: dict[str, Any] = of("state.best")
    weight: int = of("agreement.weight")  # items of the step, over all ranks

    def __init__(self, given: RunArguments, plan: PlanProtocol, ranks: Ranks) -> None:
        self.recipe, self.name, self.batch, self.options = given.recipe, given.name, given.batch, given.options
        self.command, self.plan, self.ranks = given.command, plan, ranks
        self.state, self.undo = TrainingState(), ExitStack()
        self.rank, self.world, self.device = ranks.rank, ranks.world, ranks.device
        self.metrics, self.gathered, self.summary = {}, [], {}
        self.last_metrics = self.metrics

    @property
    def lag(self) -> int:
        """Steps by which the weights are behind `step`; may be set."""
        return self.state.lag

    @lag.setter
    def lag(self, steps: int) -> None:
        self.state.lag = steps

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint of this run, or the one that it resumes."""
        return self.saver.newest or self.plan.resumed

    def emit(self, hook: str, *args: Any) -> None:
        """Call this event of all callbacks."""
        self.hooks.emit(hook, self, *args)

    def stop(self, reason: str) -> None:
        """End the run after this step. Call it on all ranks or on none: it is not a collective."""
        self.stop_reason = self.stop_reason or reason


# Attributes that stay as set-up made them.
FIXED = ("recipe", "options", "plan", "ranks", "batch", "run_dir", "hooks", "callbacks", "module", "strategy", "loss")
FIXED += ("parameters", "optimizer", "scaler", "loader", "saver", "state", "agreement")
KNOWN = {name for name in (*Context.__annotations__, *vars(Context)) if not name.startswith("_")}
