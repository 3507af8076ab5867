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
    accumulate: int  # micro-batches per rank, unless a callback splits the batch
    batch: int  # samples per optimizer step, over all ranks
    epoch_samples: int | None  # None: the data has no epochs
    source: Any  # samples by reference, or an iterable of batches
    rate: Any  # `Rate`: the learning rates as functions of the step
    order: Any  # the order of the samples; None: the recipe yields batches
    ahead: int  # the resumed checkpoint's samples in steps of this batch size, minus its own steps
    data: Any  # `DataOptions`
    validate_every: Any  # a `Duration`; None: only at the end
    resumed: Path | None  # the checkpoint that the run resumes
    manifest: dict[str, Any]  # that checkpoint's; empty for a new run
    micro: int  # samples of the largest micro-batch, unless a callback splits the batch

    def step_after(self, key: str, given: Any) -> int:
        """Return the step at which a duration from the run's start ends, such as '2 epochs'."""
        ...

    def step_at(self, samples: Fraction) -> int:
        """Return the first step after which the run has trained on this many samples."""
        ...

    def periods(self, key: str, given: Any, start: int | Fraction = 0) -> Periods:
        """Return the periods of a duration, counted in steps or in samples trained on."""
        ...

    def samples_at(self, step: int) -> int:
        """Return the number of samples trained on after a step."""
        ...

    def features(self) -> set[str]:
        """Return the enabled features of the trainer, by their names in `Callback.conflicts`."""
        ...


@dataclass
class Command:
    """The part of a run that only a command line supplies.

    Attributes:
        argv: The arguments, from which the command that resumes is made; None for a run made in Python.
        spec: A `RunSpec` with the launcher's decisions; None: rank 0 decides.
        settings: The flattened config without secrets, which must be equal on all ranks.
        machine: Properties of this machine that affect bits, for the manifest.
        save_config: Called on rank 0 with the run's folder, once all checks have passed.
            A run that crashes earlier calls it then.
        on_error: Called with the error of a failed run, before the clean-up.
        end_failed: Called after `on_error` if the device has failed, to end the process.
    """

    argv: Sequence[str] | None = None
    spec: Any = None
    settings: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    save_config: Callable[[Path], Any] = lambda run_dir: None
    on_error: Callable[[BaseException], Any] = lambda error: None
    end_failed: Callable[[BaseException], Any] = lambda error: None


@dataclass(frozen=True)
class RunArguments:
    """The arguments of `Trainer`, with defaults filled in."""

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
    """Return a property that reads a nested attribute without a Python call."""
    return property(attrgetter(path))


class Context:
    """The `trainer` argument of every hook: a run as its callbacks see it.

    A callback may read every attribute, and may set those whose comment says so. An attribute exists once set-up has
    built its object; docs/step.md gives the order.
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
    loader: Loader  # loads the data
    ddp: dict[str, Any]  # arguments of DistributedDataParallel; may be changed in `wrap_model`
    heartbeat: Heartbeat  # this rank's liveness signal; a callback announces long work with it
    undo: ExitStack  # restores process-wide settings when `fit` ends or the run is refused; add yours
    callbacks: Mapping[str, Any]  # name -> `Callback`, in their order
    hooks: Any  # `Hooks`: name -> methods of the callbacks, in their order; a list may be replaced
    ended: str  # the stop reason if the resumed run is already complete, else ""
    rehearsing = False  # the rehearsal is running; its passes are discarded
    fitted = False  # `fit` was called
    accepted = False  # all checks passed
    closed = False  # `fit` has returned
    # The model and its optimizer, once they are built.
    module: nn.Module  # the recipe's model, wrapped by callbacks but not by the strategy
    eval_model: nn.Module  # the model to validate and export; may be set
    global_model: nn.Module  # the model to save; may be set
    strategy: Strategy
    loss: Any  # `CheckedLoss`: the recipe's loss, in the run's precision
    parameters: list[nn.Parameter]
    optimizer: Any
    new_optimizer: Callable[[nn.Module], Optimizer]  # makes the run's kind of optimizer for a module's parameters
    scaler: GradScaler
    reduce: Reduce | None = None  # the Reduce chain, if a callback wraps the reduction
    buckets: list[list[int]]  # gradient buckets at the start of the first step, as indices of `parameters`
    # The step.
    data: Step
    losses: list[Tensor]  # one per micro-batch of this rank; the last one's graph has run backward
    grad_norm: Tensor  # norm before clipping, at the last step that was logged or clipped
    stop_reason = ""  # a hook that reacts to a signal on all ranks may set "signal"
    signals: StopSignals  # `name` is the stop signal that this rank has received
    metrics: dict[str, float]  # this step's metrics if it is logged, else empty; may be extended
    last_metrics: dict[str, float]  # metrics of the last logged step
    train_loss: Any  # `TrainLoss`: `measure`, a collective, returns this step's loss over all ranks
    gathered: list[Gathered]  # what the ranks exchange at logged steps; may be extended
    agreement: Any  # `StepAgreement`
    summary: dict[str, Any]  # summary of the finished run, on rank 0
    evaluate: Callable[..., dict[str, float]]  # `Trainer.evaluate`
    predict: Callable[..., Any]  # `Trainer.predict`
    validate: Callable[[], bool]  # validates now; returns whether `keep_best` wants a checkpoint; a collective
    step: int = of("state.step")
    samples: int = of("state.samples")
    seconds: float = of("state.seconds")
    validation: dict[str, float] = of("state.validation")
    validated_step: int = of("state.validated_step")
    best: dict[str, Any] = of("state.best")
    weight: int = of("agreement.weight")  # items in the step, over all ranks

    def __init__(self, given: RunArguments, plan: PlanProtocol, ranks: Ranks) -> None:
        self.recipe, self.name, self.batch, self.options = given.recipe, given.name, given.batch, given.options
        self.command, self.plan, self.ranks = given.command, plan, ranks
        self.state, self.undo = TrainingState(), ExitStack()
        self.rank, self.world, self.device = ranks.rank, ranks.world, ranks.device
        self.metrics, self.gathered, self.summary = {}, [], {}
        self.last_metrics = self.metrics

    @property
    def lag(self) -> int:
        """Steps by which the weights lag behind `step`; may be set."""
        return self.state.lag

    @lag.setter
    def lag(self, steps: int) -> None:
        self.state.lag = steps

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint of this run, else the one that it resumed."""
        return self.saver.newest or self.plan.resumed

    def emit(self, hook: str, *args: Any) -> None:
        """Call this event hook of all callbacks."""
        self.hooks.emit(hook, self, *args)

    def stop(self, reason: str) -> None:
        """End the run after this step. It communicates nothing, so call it on all ranks or on none."""
        self.stop_reason = self.stop_reason or reason


# Attributes that may not change after set-up.
FIXED = ("recipe", "options", "plan", "ranks", "batch", "run_dir", "hooks", "callbacks", "module", "strategy", "loss")
FIXED += ("parameters", "optimizer", "scaler", "loader", "saver", "state", "agreement")
KNOWN = {name for name in (*Context.__annotations__, *vars(Context)) if not name.startswith("_")}
