"""The `Trainer`, the entry point for Python programs."""

import gc
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from trainer.annotated import PositiveInt, called, check_arguments, checked, kinds_of
from trainer.callback import Callback
from trainer.checkpoint import locate
from trainer.config.duration import Duration
from trainer.config.options import DataOptions, Options
from trainer.context import Command, Context, RunArguments
from trainer.errors import ConfigError
from trainer.inference import live
from trainer.inference.dry_run import DryFolder
from trainer.inference.names import by_name
from trainer.inference.predictions import Predictions
from trainer.inference.shown import Summary, facts
from trainer.loop import Loop
from trainer.optim.factories import adamw
from trainer.optim.groups import Groups
from trainer.optim.schedule import Schedule
from trainer.process.environment import Place, detect
from trainer.process.notebook import table
from trainer.setup import build, open_run

OWN = {"dry", "given", "arguments", "loop", "places"}  # a Trainer's own attributes; all others are its run's


class Trainer:
    """Trains a recipe's model. Attributes other than methods are the run's (see `trainer.context.Context`).

    Args:
        recipe: The model, the data and the loss (see `trainer.recipe.Recipe`).
        callbacks: Name -> callback, or a list, in which each is named after its class. The order has no effect.
        optimizer: Makes the optimizer from parameter groups, in the form of torch's optimizers.
        schedule: Factor on the optimizer's learning rates.
        batch: Samples per optimizer step over all ranks. Each rank runs `micro_batch` at a time, `accumulate` times.
        place: This process among the ranks; None: read a launcher's variables.
        name: The first part of the name of the run's folder.
        command: What the command line adds.

    Raises:
        ConfigError, DataError: Something can't work. Raised before any step.
    """

    @check_arguments("")
    def __init__(
        self,
        recipe: Any,
        callbacks: Mapping[str, Callback] | Iterable[Callback] | None = None,
        optimizer: Callable[[Groups], Optimizer] = adamw,
        schedule: Schedule | Any = None,
        *,
        batch: PositiveInt,
        micro_batch: PositiveInt | None = None,
        accumulate: PositiveInt | None = None,
        options: Options | None = None,
        data: DataOptions | None = None,
        place: Place | None = None,
        name: str = "run",
        command: Command | None = None,
    ) -> None:
        named = by_name(callbacks)
        self.dry = DryFolder(options or Options(), named)
        options = self.dry.options
        self.arguments = RunArguments(
            recipe, self.dry.callbacks, optimizer, schedule, batch, micro_batch, accumulate, options,
            data or DataOptions(), place or detect(os.environ, options.devices, options.nodes), name,
            command or Command(),
        )  # fmt: skip
        # Another `fit` resets Echelon's own callbacks to this; a user's callbacks keep their attributes.
        own = [callback for callback in named.values() if type(callback).__module__.startswith("trainer.")]
        self.given = [(callback, deepcopy(vars(callback))) for callback in own]
        try:
            self.loop = start(self.arguments)
        except BaseException:
            self.dry.close()
            raise
        self.places = places_of(self.loop)

    def fit(self, max_steps: int | None = None, max_epochs: float | None = None) -> dict[str, Any]:
        """Train to the end, or until stopped. Weights, optimizer and callbacks keep the state of the last step.

        Another `fit` starts a new run in the same folder, which resumes the last checkpoint, up to new limits if these
        are given.

        Returns:
            The content of summary.json, on every rank.

        Raises:
            ConfigError: Another `fit` can't resume.
        """
        refuse_other_folder(self.places, places_of(self.loop))
        if self.loop.context.fitted:
            options = options_of_next(self.loop, max_steps, max_epochs)
            for callback, attributes in self.given:
                vars(callback).clear()
                vars(callback).update(deepcopy(attributes))
            command = replace(self.arguments.command, spec=None)
            self.loop = start(replace(self.arguments, options=options, command=command))
            gc.collect()  # the previous run is a reference cycle that holds its model's weights
        elif max_steps is not None or max_epochs is not None:
            raise ConfigError("fit: limits are for a further fit; give the first ones as Options(max_steps=N)")
        summary = self.loop.fit()
        self.dry.close()
        return Summary(summary)

    def evaluate(self, split: str = "val") -> dict[str, float]:
        """Return the metrics over all samples of `recipe.data(split)`, named `SPLIT/METRIC`. A collective."""
        return live.evaluate(self.loop.context, split)

    def predict(self, split: str = "val") -> Predictions:
        """Return the results of `recipe.predict` for all samples of `recipe.data(split)`, in order. A collective."""
        return live.predict(self.loop.context, split)

    def close(self) -> None:
        """End the process groups of a run that will not train. The weights stay in `module`."""
        self.loop.close()
        self.dry.close()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the run, such as `module`, `step` or `best`."""
        if name in OWN or not hasattr(self.loop.context, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loop.context, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *dir(self.loop.context)]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the run. Unknown attributes are refused at the next step.

        Raises:
            ConfigError: The name is a method's.
        """
        if callable(getattr(Trainer, name, None)):
            raise ConfigError(f"trainer.{name}: is a method, which can't be replaced; define it in a class of your own")
        own = name in OWN or "loop" not in vars(self)  # a subclass may set attributes earlier
        object.__setattr__(self if own else self.loop.context, name, value)

    def __repr__(self) -> str:
        """Return the run in one line. A Trainer that is still being made has no run."""
        return called(self, "run_dir", "batch", "step", "world") if "loop" in vars(self) else "Trainer()"

    def _repr_html_(self) -> str:
        return table(facts(self.loop.context))


def start(given: RunArguments) -> Loop:
    """Build a run. If it is refused, undo its folder, claim, log and process groups."""
    with ExitStack() as refused:
        context, plan = open_run(given, refused)
        loop = Loop(context, build(context, plan, given.optimizer))
        refused.pop_all()
    return loop


def places_of(loop: Loop) -> tuple[str, ...]:
    """Return the paths of the run's files and checkpoints, resolved from the current folder."""
    return os.path.abspath(loop.context.run_dir), os.path.abspath(loop.checkpointer.folder)


def refuse_other_folder(made: tuple[str, ...], now: tuple[str, ...]) -> None:
    """Raise ConfigError if the current folder has changed since the run was created."""
    for before, after in zip(made, now, strict=True):
        if before != after:
            raise ConfigError(
                f"fit: the current folder has changed since Trainer(), so the run would write into {before} and "
                f"{after}; change it before Trainer(), or give run_dir and checkpoint.dir as absolute paths"
            )


def options_of_next(loop: Loop, max_steps: int | None, max_epochs: float | None) -> Options:
    """Return the options of a run that resumes this one's last checkpoint.

    Raises:
        ConfigError: No step is left, the run has no checkpoint, or its ranks have failed.
    """
    context: Context = loop.context
    if not context.closed and context.world > 1:
        raise ConfigError("fit: the ranks of this run failed; make another Trainer, and resume with trainer.resume")
    folder = loop.checkpointer.folder
    if not locate.checkpoints(folder):
        raise ConfigError(f"fit: {folder} has no checkpoint to resume from; make another Trainer")
    limits = limits_of(loop, max_steps, max_epochs)
    return replace(context.options, resume=str(folder), run_dir=str(context.run_dir), **limits)


def limits_of(loop: Loop, max_steps: int | None, max_epochs: float | None) -> dict[str, Any]:
    """Return the options that limit the steps. If a limit is given, it replaces both.

    Raises:
        ConfigError: The run has already done all of these steps, or `Options` refuses a limit.
    """
    max_steps, max_epochs = (
        checked(f"fit({name})", value, kinds_of(Options)[name])
        for name, value in (("max_steps", max_steps), ("max_epochs", max_epochs))
    )
    options, limit, step = loop.context.options, loop.plan.max_steps, loop.state.step
    given = {"max_steps": options.max_steps, "max_epochs": options.max_epochs}
    if max_steps is not None or max_epochs is not None:
        given = {"max_steps": max_steps, "max_epochs": max_epochs}
        steps = [] if max_steps is None else [max_steps]
        if max_epochs is not None:
            steps.append(loop.plan.step_after("fit(max_epochs)", Duration(max_epochs, "epochs")))
        limit = min(steps)
    if limit is not None and step >= limit:
        raise ConfigError(
            f"fit: the run is at step {step} of {limit}, so no step is left; "
            f"give more, as in fit(max_steps={step * 2 or 100})"
        )
    return given
