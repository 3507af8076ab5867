"""Lets a second `fit` go on from the last checkpoint of the run, as a resume does."""

import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, Protocol

from trainer.annotated import checked, kinds_of
from trainer.callback import Callback
from trainer.checkpoint import locate
from trainer.config.duration import Duration
from trainer.config.options import Options
from trainer.errors import ConfigError
from trainer.training_state import SavedTrainer, saved_in


class Again:
    """Makes a trainer anew. Echelon's own callbacks begin as they were given; a program's own keep their attributes.

    Args:
        make: Constructs the trainer with other options.
    """

    def __init__(self, make: Callable[..., None], callbacks: Mapping[str, Callback]) -> None:
        self.make = make
        own = [callback for callback in callbacks.values() if type(callback).__module__.startswith("trainer.")]
        self.given = [(callback, deepcopy(vars(callback))) for callback in own]

    def __call__(self, options: Options) -> None:
        for callback, attributes in self.given:
            vars(callback).clear()
            vars(callback).update(attributes)
        self.make(options=options)


class MadeAgain(SavedTrainer, Protocol):
    """The attributes of a trainer that can be made again."""

    batch: int
    make_again: Again
    places: tuple[str, ...]  # of the run's files, as absolute paths, when the trainer was made
    fitted: bool  # `fit` was called
    closed: bool  # `fit` has returned


def prepare(trainer: MadeAgain, max_steps: int | None, max_epochs: float | None) -> None:
    """Before a further `fit`, make the trainer again, resumed from its last checkpoint. The run's folder stays.

    Raises:
        ConfigError: No step is left, the run has no checkpoint, its ranks no longer work together, or the current
            folder has changed.
    """
    for made, now in zip(trainer.places, places_of(trainer)):
        if made != now:
            raise ConfigError(
                f"fit: the current folder has changed since Trainer(), so the run would write into {made} and {now}; "
                "change it before Trainer(), or give run_dir and checkpoint.dir as absolute paths"
            )
    if not trainer.fitted:
        if max_steps is not None or max_epochs is not None:
            raise ConfigError("fit: limits are for a further fit; give the first ones as Options(max_steps=N)")
        return
    if not trainer.closed and trainer.world > 1:
        raise ConfigError("fit: the ranks of this run failed; make another Trainer, with trainer.resume to go on")
    saved = saved_in(trainer)
    if not locate.checkpoints(saved):
        raise ConfigError(f"fit: {saved} has no checkpoint to go on from; make another Trainer")
    limits = limits_of(trainer, max_steps, max_epochs)
    trainer.make_again(replace(trainer.options, resume=str(saved), run_dir=str(trainer.run_dir), **limits))


def places_of(trainer: SavedTrainer) -> tuple[str, ...]:
    """Return where the run's files and its checkpoints lie, seen from the current folder."""
    return os.path.abspath(trainer.run_dir), os.path.abspath(saved_in(trainer))


def limits_of(trainer: MadeAgain, max_steps: int | None, max_epochs: float | None) -> dict[str, Any]:
    """Return the options that limit the steps. Given ones replace both.

    Raises:
        ConfigError: The run has made all of these steps, or a limit is none that `Options` takes.
    """
    max_steps, max_epochs = (
        checked(f"fit({name})", value, kinds_of(Options)[name])
        for name, value in (("max_steps", max_steps), ("max_epochs", max_epochs))
    )
    options, limit = trainer.options, trainer.plan.max_steps
    given = {"max_steps": options.max_steps, "max_epochs": options.max_epochs}
    if max_steps is not None or max_epochs is not None:
        given = {"max_steps": max_steps, "max_epochs": max_epochs}
        steps = [] if max_steps is None else [max_steps]
        if max_epochs is not None:
            steps.append(trainer.plan.step_after("fit(max_epochs)", Duration(max_epochs, "epochs")))
        limit = min(steps)
    if limit is not None and trainer.step >= limit:
        raise ConfigError(
            f"fit: the run is at step {trainer.step} of {limit}, so no step is left; "
            f"give more, as in fit(max_steps={trainer.step * 2 or 100})"
        )
    return given
