"""The contract of a callback: its hooks, its role and its conflicts."""

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, IntEnum
from typing import Any, ClassVar, TypeVar

from torch import nn
from torch.optim import Optimizer

from trainer.annotated import called, check_arguments
from trainer.comm.reduce import Reduce
from trainer.context import Context
from trainer.cost.setup import Cost
from trainer.cost.variant import Situation, Variant
from trainer.data.batch import Split, Step
from trainer.parallel.forward_backward import ForwardBackward
from trainer.parallel.strategy import Strategy

OWN = re.compile(r"trainer\.(?:callbacks|monitors|loggers)\.(\w+)")
WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # boundaries between the words of a class name

Event = TypeVar("Event", bound=Callable[..., None])


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


class Symptom(Enum):
    """A problem that a monitor detects and a callback may help with."""

    NETWORK = "ranks wait for communication"
    NODES = "ranks of several nodes wait for communication"
    SLOW_RANK = "ranks wait for one that computes longer"
    KERNELS = "a GPU waits between small kernels"
    TRAFFIC = "a link carries too many bytes"
    MEMORY = "memory runs out"


UNLOGGED = "on_step_end, not logged"  # a further list in `Hooks`: the calls after steps that are not logged


def only_logged(on_step_end: Event) -> Event:
    """Mark a hook that acts only at logged steps, so that no other step pays for the call."""
    on_step_end.only_logged = True  # pyright: ignore[reportFunctionMemberAccess]
    return on_step_end


class Callback:
    """Base class of callbacks. Every hook is optional.

    A misspelt hook is an error when the class is defined. Any other method named on_* or wrap_* counts as misspelt, and
    so does one that takes the trainer and nearly has a hook's name. The constructor's arguments are checked against its
    annotations.
    """

    role: ClassVar[Role] = Role.OBSERVE
    also: ClassVar[tuple[Role, ...]] = ()  # further roles that it fills, so no other callback may
    shares_with: frozenset[Role] = frozenset()  # a callback of these may fill this one's role too, and then distributes
    exact: bool = True  # training gives the same numbers as without the callback, up to rounding
    communicates: ClassVar[bool] = False  # only communicates: does nothing on one rank, and the log says so
    stages: int = 1  # ranks that read the same samples: a batch is split over world / stages
    provides: frozenset[str] = frozenset()  # capabilities that other callbacks refuse or need; listed in docs/step.md
    family: ClassVar[tuple[str, ...]] = ()  # knobs for each of whose values `tune` corrects the cost model separately
    remedies: ClassVar[Mapping[Symptom, Sequence[Mapping[str, Any]]]] = {}  # symptom -> knobs that help, all tried
    metric: str = ""  # a metric that validation must return, for example `val/loss`
    # A role, a capability, or a feature of the trainer (`Plan.features`) -> reason and fix.
    conflicts: Mapping[Any, str] = {}
    requires: Mapping[str, str] = {}  # a capability -> reason and fix

    # Set-up hooks, called in this order, except `split`, which is called per step. Each takes and returns one object.
    def build_model(self, trainer: Context, build: Callable[[], nn.Module]) -> nn.Module:
        """Build the recipe's model with `build`, on the CPU. A model on the meta device stays there."""
        return build()

    def wrap_model(self, trainer: Context, model: nn.Module) -> nn.Module:
        """Return the module, which is on its device but not distributed yet. Keep the parameters' names."""
        return model

    def wrap_reduce(self, trainer: Context, reduce: Reduce) -> Reduce:
        """Return the reduction of one bucket, as blocking code. Called only with two or more ranks."""
        return reduce

    def distribute(self, trainer: Context, model: nn.Module) -> Strategy:
        """Return a layout of the model over the ranks, in place of DDP. Only a callback of role SHARD may have this.

        With a callback of a role in `shares_with`, this one's hook is not called.
        """
        raise NotImplementedError

    def wrap_optimizer(self, trainer: Context, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer for the strategy's parameters."""
        return optimizer

    def wrap_forward_backward(self, trainer: Context, run: ForwardBackward) -> ForwardBackward:
        """Return the forward and backward passes of a step. The rehearsal uses them too."""
        return run

    def wrap_batches(self, trainer: Context, steps: Iterator[Step]) -> Iterator[Step]:
        """Return the steps' data, one item per step. Called in `fit`."""
        return steps

    def split(self, trainer: Context, position: int) -> Split:
        """Return the split of the step at this position in the samples. Only a callback of role BATCH may have this.

        It must be a pure function, the same on all ranks: the loader calls it ahead of the step, and a resume calls it
        again.
        """
        raise NotImplementedError

    def rehearse(self, trainer: Context, run_pass: Callable[[Any], None], batch: Any) -> None:
        """Measure passes that are discarded: `run_pass` runs `forward_backward` on a batch, such as this rank's first.

        Called in `fit`, on every rank.
        """

    # Events.
    def on_fit_start(self, trainer: Context) -> None:
        """Prepare for the first step. All state is restored by now."""

    def on_before_optimizer_step(self, trainer: Context) -> None:
        """Read or change the gradients, which are reduced and unscaled but not yet clipped."""

    def on_step_undone(self, trainer: Context) -> None:
        """Drop this step's state, because a guard has dropped its gradients."""

    def on_step_end(self, trainer: Context) -> None:
        """React to a step: `trainer.step` counts it, and `trainer.metrics` has its metrics if it is logged.

        Metrics that a callback adds reach the loggers only at logged steps.
        Mark the hook `@only_logged` if it does nothing at other steps.
        """

    def on_flush(self, trainer: Context) -> None:
        """Finish deferred work, because the weights are about to be read."""

    def on_validation_end(self, trainer: Context, metrics: dict[str, float]) -> None:
        """React to a validation. The metrics are the same on all ranks."""

    def on_media(self, trainer: Context, media: Mapping[str, Any]) -> None:
        """Log texts, images and values for histograms (`trainer.metrics.media.prepared`). Called on rank 0 only.

        The recipe's `media` supplies them at each validation. A callback may emit its own:
        `trainer.emit("on_media", {"generated": text})`.
        """

    def on_event(self, trainer: Context, event: str, facts: dict[str, Any]) -> None:
        """Handle an event between steps: `checkpoint` (rank 0 alone), `skip`. `facts` are JSON values."""

    def on_error(self, trainer: Context, error: BaseException) -> None:
        """Amend the error that ends the run, for example with a note, before it is reported."""

    def on_fit_end(self, trainer: Context) -> None:
        """Release resources. Always called, also after an exception."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resume needs: tensors and JSON values, keyed by parameter name, never by bucket."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`. Called before `on_fit_start`."""

    def decisions(self) -> dict[str, Any]:
        """Return the JSON values that a resume needs before it loads data. They are stored in the manifest."""
        return {}

    def has_ended(self, decisions: Any) -> bool:
        """Return whether a resumed run with these decisions would end at once. They are untrusted and may be None."""
        return False

    def rank_state_dict(self) -> dict[str, Any]:
        """Return the state that differs between ranks. It is empty on all ranks or on none."""
        return {}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Restore this rank's state, or the merged state if the number of ranks differs."""

    def merge_rank_states(self, states: Iterator[dict[str, Any]]) -> dict[str, Any]:
        """Merge the states of all ranks into one for every rank. Called if the number of ranks differs.

        Each state is read when the iterator reaches it. Drop it before the next, because all may not fit in memory.
        """
        raise NotImplementedError

    def cost(self) -> Cost | None:
        """Return how this callback changes the cost of a step, for `tune` and `scale`; None if it is not modelled.

        Callbacks that measure or show metrics are part of the measured fixed seconds of a step.
        """
        return Cost() if self.role >= Role.MEASURE else None

    @classmethod
    def variants(cls, at: Situation) -> Iterable[Variant]:
        """Return the variants that `tune` tries, one at a time, with callbacks of other roles."""
        return ()

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
    """Return the config name of one of Echelon's callbacks; for any other class, its name in snake_case."""
    own = OWN.match(kind.__module__)
    return own[1] if own else WORD.sub("_", kind.__name__).lower()


def takes_trainer(name: str, value: object) -> bool:
    """Return whether this is a public method whose first argument is the trainer."""
    if name.startswith("_") or not inspect.isfunction(value):
        return False
    return list(inspect.signature(value).parameters)[1:2] == ["trainer"]


def is_like_hook(name: str, value: object) -> bool:
    """Return whether an unknown name starts like a hook's, or nearly equals one and its method takes the trainer."""
    similar = takes_trainer(name, value) and difflib.get_close_matches(name.lower(), HOOKS, cutoff=0.7)
    return bool(similar) or name.startswith(("on_", "wrap_"))


HOOKS = tuple(name for name, value in vars(Callback).items() if takes_trainer(name, value))


def overrides(callback: Callback, hook: str) -> bool:
    """Return whether the callback's class overrides this hook."""
    return getattr(type(callback), hook) is not getattr(Callback, hook)


def name_of(callback: Callback, callbacks: Mapping[str, Callback]) -> str:
    """Return the callback's name in the config."""
    return next(name for name, other in callbacks.items() if other is callback)
