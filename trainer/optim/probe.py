"""Steps a copy of an optimizer on small parameters before the run, to find out what its step needs and keeps."""

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trainer.errors import ConfigError

STEPS = 3  # the first step has no history, so it may leave as it is what later steps change
MOST = 3  # parameters of a group that are tried
KNOWN = ("torch.optim.", "trainer.optim.", "bitsandbytes.")  # modules whose steps are known to pass
NOT_KEPT = ("params", "lr", "initial_lr")  # keys of a group: rates follow from the schedule
GROUP, OWN = "group.", "own."  # before the names of `Steps.kept`, as checkpoints have them


@dataclass(frozen=True)
class Steps:
    """The side effects of an optimizer's step, beyond parameters and their state.

    Attributes:
        kept: Names of the numbers that it changes: with the prefix `GROUP` in groups, or `OWN` in the optimizer itself.
        coupled: A parameter's step depends on other parameters.
    """

    kept: frozenset[str] = frozenset()
    coupled: bool = False


FOUND: WeakKeyDictionary[Any, Steps] = WeakKeyDictionary()


def steps_of(optimizer: Any) -> Steps:
    """Return what `probe` has found; for a proxy, about the optimizer inside."""
    return FOUND.get(getattr(optimizer, "optimizer", optimizer)) or FOUND.get(optimizer, Steps())


def kept_of(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a group and of the optimizer that its steps change, by their names in checkpoints."""
    inner, kept = getattr(optimizer, "optimizer", optimizer), steps_of(optimizer).kept
    places = {GROUP: group, OWN: vars(inner)}
    return {name: places[of][key] for name in sorted(kept) for of, key in [split(name)] if key in places[of]}


def put_kept(optimizer: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
    """Remove the values of `kept_of` from a parameter's state, and restore them in its group and the optimizer.

    Only numbers that this optimizer's steps change are restored, because an untrusted checkpoint may name any
    attribute.
    """
    places = {GROUP: group, OWN: vars(getattr(optimizer, "optimizer", optimizer))}
    for name in steps_of(optimizer).kept & state.keys():
        of, key = split(name)
        places[of][key] = state.pop(name)


def split(name: str) -> tuple[str, str]:
    of, dot, key = name.partition(".")
    return of + dot, key


def refuse_coupled(optimizer: Any, key: str, by_parameter: bool = False) -> None:
    """Raise ConfigError if stepping some parameters at a time, as a callback does, would change the results.

    Args:
        key: The callback's setting.
        by_parameter: Groups are copied for each step, so numbers in them are lost.
    """
    found, kind = steps_of(optimizer), type(optimizer).__name__
    if found.coupled:
        why = "takes all parameters into account, and here it gets some of them at a time"
    elif by_parameter and found.kept:
        names = ", ".join(sorted(name.partition(".")[2] for name in found.kept))
        why = f"changes {names} of all parameters, and here it is called for some of them at a time"
    else:
        return
    raise ConfigError(f"{key}: the step of {kind} {why}; leave {key} out, or choose another optimizer, such as adamw")


def probe(optimizer: Any) -> None:
    """Find out and record what a step of a third-party optimizer does.

    Raises:
        ConfigError: A step needs a closure.
    """
    if f"{type(optimizer).__module__}.".startswith(KNOWN):
        return
    with torch.random.fork_rng(devices=[]):  # a step may draw random numbers
        try:
            together = shrunk(optimizer)
            before = numbers(together)
            run_steps(together, [together])
        except Exception as error:  # of any class: it is the optimizer's own code, which may need a GPU
            if "closure" in str(error).lower():
                raise ConfigError(
                    f"optimizer: {type(optimizer).__name__}.step() needs a closure, and Echelon computes the gradient "
                    "of a step once; choose an optimizer whose step needs none, such as adamw"
                ) from None
            return
        FOUND[optimizer] = Steps(changed_by(together, before), couples(optimizer, together))


def run_steps(optimizer: Any, parts: Sequence[Any]) -> None:
    """Step `parts`, which have the parameters of `optimizer`, by the same gradients each time."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number in range(STEPS):
        for i, p in enumerate(params):
            p.grad = torch.sin(torch.arange(1.0, p.numel() + 1) * (i + 1) + number).reshape(p.shape).to(p.dtype)
        for part in parts:
            part.step()


def changed_by(made: Any, before: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the numbers that steps have changed. With one of a group, those of it that are no setting."""
    after = numbers(made)
    changed = {name for name, value in after.items() if name not in before or not close(before[name], value, 0.0)}
    kept = {name.partition("/")[2] for name in changed}
    if any(name.startswith(GROUP) for name in kept):  # the others may change later
        settings = {f"{GROUP}{name}" for name in inspect.signature(type(made).__init__).parameters}
        kept |= {own for _, _, own in (name.partition("/") for name in after) if own.startswith(GROUP)} - settings
    return frozenset(kept)


def couples(optimizer: Any, together: Any) -> bool:
    """Return whether optimizers of one parameter each get different results from `together`, one of all parameters."""
    whole = shrunk(optimizer)
    places = [(i, p) for i, group in enumerate(whole.param_groups) for p in group["params"]]
    parts = [alone(whole, i, p) for i, p in places]
    try:
        run_steps(whole, parts)
    except Exception:  # as where a norm is of no parameter
        return True
    expected = numbers(together)
    for part, (i, _) in zip(parts, places, strict=True):
        own = {name: value for name, value in numbers(part).items() if name.startswith((f"{i}/", f"/{OWN}"))}
        if not all(close(expected.get(name), value) for name, value in own.items()):
            return True
    params = [p for group in together.param_groups for p in group["params"]]
    return not all(close(one, p) for one, (_, p) in zip(params, places, strict=True))


def alone(optimizer: Any, group: int, p: Tensor) -> Any:
    """Return a copy of the optimizer, with the same groups and one parameter."""
    others = {id(q): q for each in optimizer.param_groups for q in each["params"]}
    memo = others | {id(each["params"]): [p] if i == group else [] for i, each in enumerate(optimizer.param_groups)}
    return copied(optimizer, memo)


def shrunk(optimizer: Any) -> Any:
    """Return a copy of the optimizer with at most `MOST` parameters a group, each with two values a dimension."""
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        small = [
            torch.nn.Parameter(torch.full([2] * p.dim(), 0.1 * (i + 1), dtype=p.dtype))
            for i, p in enumerate(group["params"][:MOST])
        ]
        memo |= {id(p): q for p, q in zip(group["params"], small)}
        memo |= {id(p): small[0] for p in group["params"][MOST:]}  # also where an optimizer keeps them elsewhere
        memo[id(group["params"])] = small
    return copied(optimizer, memo)


def copied(optimizer: Any, memo: Mapping[int, Any]) -> Any:
    """Return a deep copy without hooks, in which the values of `memo` take the places of objects with these ids."""
    memo, kind = dict(memo), cast(Any, type(optimizer))
    made = kind.__new__(kind)
    left_out = {"state", "step", *(name for name in vars(optimizer) if name.endswith("_hooks"))}
    own = {name: value for name, value in vars(optimizer).items() if name not in left_out}
    hooks = {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}
    vars(made).update(copy.deepcopy(own, memo) | hooks | {"state": defaultdict(dict)})
    return made


def numbers(optimizer: Any) -> dict[str, Any]:
    """Return the plain values of the groups and of the optimizer itself."""

    def all_of() -> Iterator[tuple[str, Any]]:
        for i, group in enumerate(optimizer.param_groups):
            yield from ((f"{i}/{GROUP}{name}", value) for name, value in group.items() if name not in NOT_KEPT)
        yield from ((f"/{OWN}{name}", value) for name, value in vars(optimizer).items())

    return {name: copy.copy(value) for name, value in all_of() if is_plain(value)}


def is_plain(value: Any) -> bool:
    return (
        value is None or isinstance(value, bool | int | float | str) or (isinstance(value, Tensor) and not value.dim())
    )


def close(one: Any, other: Any, within: float = 1e-5) -> bool:
    """Return whether two plain values or tensors are equal, numbers up to a share of their size."""
    if isinstance(one, bool | str | None) or isinstance(other, bool | str | None):
        return one == other
    return torch.allclose(torch.as_tensor(one), torch.as_tensor(other), rtol=within, atol=0.0, equal_nan=True)
