"""Checks users' callbacks: their hooks' parameters and return values, and the attributes they set on the trainer."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from trainer.callback import HOOKS, Callback
from trainer.checkpoint.direction import warn_of_direction
from trainer.checkpoint.serialize import Pack
from trainer.checks.recipe import describe, number_of, other_parameters
from trainer.data.batch import Split
from trainer.errors import ConfigError, nearest

# Hook -> the kind of its return value, and what a message calls it.
RETURNED: Mapping[str, tuple[type, str]] = {
    "build_model": (nn.Module, "the nn.Module of build()"),
    "wrap_model": (nn.Module, "the nn.Module, wrapped or not"),
    "distribute": (object, "a Strategy"),
    "split": (Split, "a Split"),
}
INSTEAD = {"should_stop": "call trainer.stop('reason'), on all ranks", "model": "read trainer.module"}
WRAPS = {
    "optimizer": "return it from the hook wrap_optimizer",
    "module": "return it from the hook wrap_model, or change its parameters' data",
    "strategy": "return it from the hook distribute",
    "loss": "set trainer.recipe.loss",
}
SAVED = ("state_dict", "rank_state_dict", "decisions")
STATES = (*SAVED, "load_state_dict", "load_rank_state_dict", "merge_rank_states", "has_ended")


def refuse_no_callback(key: str, callback: Any) -> None:
    """Refuse anything but a callback, with a hint if it is a class or a name."""
    if isinstance(callback, Callback):
        return
    if isinstance(callback, type):
        raise ConfigError(f"{key}: is the class {callback.__name__}, not an object of it; give {callback.__name__}()")
    if isinstance(callback, str):
        raise ConfigError(f"{key}={callback}: is a name; in Python give an object, as EMA() of trainer.callbacks.ema")
    raise ConfigError(
        f"{key}: {type(callback).__name__} is not a callback; give a class that inherits from trainer.callback.Callback"
    )


def refuse_other_hooks(name: str, callback: Callback) -> None:
    for hook in (*HOOKS, *STATES):
        if other := other_parameters(getattr(callback, hook), getattr(Callback, hook)):
            raise ConfigError(f"callbacks.{name}.{hook}{other}")


def refuse_other_value(name: str, hook: str, value: Any) -> None:
    kind, expected = RETURNED.get(hook, (object, "the object that it was given, wrapped or not"))
    optimizer = hook == "wrap_optimizer" and not hasattr(value, "param_groups")
    if value is None or isinstance(value, type) or not isinstance(value, kind) or optimizer:
        raise ConfigError(f"callbacks.{name}.{hook}(): returned {describe(value)}; return {expected}")


def check_watched(name: str, plan: Any, metric: str, mode: str) -> None:
    """Refuse a run without validations to watch; warn if the metric's name contradicts `mode`, `min` or `max`."""
    if plan.validate_every is None:
        raise ConfigError(
            f"callbacks.{name}.metric={metric}: this run validates only at its end; give trainer.validate_every, or "
            f"leave {name} out (~callbacks.{name})"
        )
    other = "min" if mode == "max" else "max"
    setting, fix = (f"callbacks.{name}.mode={each}" for each in (mode, other))
    warn_of_direction(setting, metric, mode == "max", fix)


def owner(call: Callable[..., Any], callbacks: Mapping[str, Callback]) -> str:
    """Return the name of the callback that this hook belongs to, or of the function that replaces one."""
    own = getattr(call, "__self__", None)
    return next((name for name, callback in callbacks.items() if callback is own), getattr(call, "__name__", "hook"))


def numbers_only(call: Callable[..., Any], metrics: dict[str, float], callbacks: Mapping[str, Callback]) -> None:
    """Convert what the hook `call` has added to `trainer.metrics` into plain numbers."""
    for key, value in metrics.items():
        if type(value) is not float and type(value) is not int:
            if (number := number_of(value)) is None:
                raise ConfigError(
                    f"callbacks.{owner(call, callbacks)}.on_step_end(): trainer.metrics[{key!r}] is {describe(value)}; "
                    "give a number, and texts and images by trainer.emit('on_media', {...})"
                )
            metrics[key] = number


def saved(name: str, callback: Callback, hook: str) -> dict[str, Any]:
    """Return the state that a hook supplies for a checkpoint, checked unless the callback is Echelon's own."""
    value, where = getattr(callback, hook)(), f"callbacks.{name}.{hook}()"
    if type(callback).__module__.startswith("trainer."):
        return value
    expected = "a dict of tensors and JSON values"
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: returned {describe(value)}; return {expected}")
    for key, item in value.items():
        try:
            json.dumps(item) if hook == "decisions" else Pack().encode(item, (str(key),))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: {key!r} can't be saved ({error}); return {expected}") from None
    return value


def refuse_attributes(
    new: Iterable[str], replaced: Iterable[str], known: Iterable[str], callbacks: Mapping[str, Callback]
) -> None:
    """Refuse attributes that were set on the trainer but that nothing reads.

    `new` ones the trainer does not have; `replaced` ones only take effect at set-up. The message names the callback, if
    its source shows that it sets the attribute.
    """
    for name in (*sorted(new), *replaced):
        where = next((f"callbacks.{c}.{hook}(): " for c, one in callbacks.items() for hook in setters(one, name)), "")
        why, instead = "and the trainer has no such attribute", "keep state of your own in the callback's attributes"
        if name in known:
            why, instead = "and the steps use what set-up made", WRAPS.get(name, "make another Trainer with it")
        else:
            instead = INSTEAD.get(name, f"{instead} ({nearest(name, known)})")
        raise ConfigError(f"{where}trainer.{name} was set, {why}; {instead}")


def refuse_endless(max_steps: int | None, callbacks: Mapping[str, Callback]) -> None:
    ends = ("stop", "stop_reason")
    if max_steps is None and not any(setters(callback, name) for callback in callbacks.values() for name in ends):
        raise ConfigError(
            "trainer.max_steps=null: the run would never end; give trainer.max_steps or trainer.max_epochs, in Python "
            "Options(max_steps=N), or a callback that stops it, such as early_stop"
        )


def setters(callback: Callback, name: str) -> list[str]:
    """Return the methods of a callback's class that use an attribute of this name, on any object."""
    functions: dict[str, Callable[..., Any]] = dict(inspect.getmembers(type(callback), inspect.isfunction))
    return [method for method, function in functions.items() if name in function.__code__.co_names]
