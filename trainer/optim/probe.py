"""Steps a small copy of an optimizer before the run, to find out what its step requires and changes."""

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
from trainer.optim.made import closure_needed

STEPS = 3  # the first step has no history, so it may not change everything that later steps change
MOST = 3  # parameters per group that are tried
KNOWN = ("torch.optim.", "trainer.optim.", "bitsandbytes.")  # modules whose optimizers need no probe
NOT_KEPT = ("params", "lr", "initial_lr")  # keys of a group: rates follow from the schedule
GROUP, OWN = "group.", "own."  # prefixes of numbers in a group, and in the optimizer itself, also in checkpoints


@dataclass(frozen=True)
class Steps:
    """The effects of an optimizer's step beyond parameters and their state."""

    kept: frozenset[str] = frozenset()  # numbers that it changes, prefixed with `GROUP` or `OWN`
    coupled: bool = False  # a parameter's step depends on other parameters


FOUND: WeakKeyDictionary[Any, Steps] = WeakKeyDictionary()


def steps_of(optimizer: Any) -> Steps:
    """Return what `probe` found; for a proxy, about the optimizer inside."""
    return FOUND.get(getattr(optimizer, "optimizer", optimizer)) or FOUND.get(optimizer, Steps())


def kept_of(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a group and of the optimizer that steps change, by their names in checkpoints."""
    inner, kept = getattr(optimizer, "optimizer", optimizer), steps_of(optimizer).kept
    places = {GROUP: group, OWN: vars(inner)}
    return {name: places[of][key] for name in sorted(kept) for of, key in [split(name)] if key in places[of]}


def put_kept(optimizer: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
    """Remove the values of `kept_of` from a parameter's state, and restore them in its group and in the optimizer.

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
    """Refuse an optimizer whose results would change if some parameters were stepped at a time.

    `by_parameter` states that groups are copied for each step, so numbers in them are lost.
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
    """Find out and record what a step of a third-party optimizer does. Refuse a step that needs a closure."""
    if f"{type(optimizer).__module__}.".startswith(KNOWN):
        return
    with torch.random.fork_rng(devices=[]):  # a step may draw random numbers
        try:
            together = shrunk(optimizer)
            before = numbers(together)
            run_steps(together, [together])
        except Exception as error:  # of any class, because it is a third party's code, which may need a GPU
            if "closure" in str(error).lower():
                raise closure_needed(optimizer) from None
            return
        FOUND[optimizer] = Steps(changed_by(together, before), couples(optimizer, together))


def run_steps(optimizer: Any, parts: Sequence[Any]) -> None:
    """Step `parts`, which have the parameters of `optimizer`, with the same gradients each time."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number in range(STEPS):
        for i, p in enumerate(params):
            p.grad = torch.sin(torch.arange(1.0, p.numel() + 1) * (i + 1) + number).reshape(p.shape).to(p.dtype)
        for part in parts:
            part.step()


def changed_by(made: Any, before: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the numbers that steps have changed.

    If one of a group has changed, all of the group's numbers that are no settings are included, as they may change
    later.
    """
    after = numbers(made)
    changed = {name for name, value in after.items() if name not in before or not close(before[name], value, 0.0)}
    kept = {name.partition("/")[2] for name in changed}
    if any(name.startswith(GROUP) for name in kept):
        settings = {f"{GROUP}{name}" for name in inspect.signature(type(made).__init__).parameters}
        kept |= {own for _, _, own in (name.partition("/") for name in after) if own.startswith(GROUP)} - settings
    return frozenset(kept)


def couples(optimizer: Any, together: Any) -> bool:
    """Return whether stepping each parameter with its own optimizer differs from `together`, which stepped all."""
    whole = shrunk(optimizer)
    places = [(i, p) for i, group in enumerate(whole.param_groups) for p in group["params"]]
    parts = [alone(whole, i, p) for i, p in places]
    try:
        run_steps(whole, parts)
    except Exception:  # such as for the norm of an empty list
        return True
    expected = numbers(together)
    for part, (i, _) in zip(parts, places, strict=True):
        own = {name: value for name, value in numbers(part).items() if name.startswith((f"{i}/", f"/{OWN}"))}
        if not all(close(expected.get(name), value) for name, value in own.items()):
            return True
    params = [p for group in together.param_groups for p in group["params"]]
    return not all(close(one, p) for one, (_, p) in zip(params, places, strict=True))


def alone(optimizer: Any, group: int, p: Tensor) -> Any:
    """Return a copy of the optimizer with the same groups and a single parameter."""
    others = {id(q): q for each in optimizer.param_groups for q in each["params"]}
    memo = others | {id(each["params"]): [p] if i == group else [] for i, each in enumerate(optimizer.param_groups)}
    return copied(optimizer, memo)


def shrunk(optimizer: Any) -> Any:
    """Return a copy of the optimizer with at most `MOST` parameters per group, each of size 2 in every dimension."""
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        small = [
            torch.nn.Parameter(torch.full([2] * p.dim(), 0.1 * (i + 1), dtype=p.dtype))
            for i, p in enumerate(group["params"][:MOST])
        ]
        memo |= {id(p): q for p, q in zip(group["params"], small)}
        memo |= {id(p): small[0] for p in group["params"][MOST:]}  # wherever else the optimizer has them
        memo[id(group["params"])] = small
    return copied(optimizer, memo)


def copied(optimizer: Any, memo: Mapping[int, Any]) -> Any:
    """Return a deep copy without hooks, with objects replaced by id as in `memo`."""
    memo, kind = dict(memo), cast(Any, type(optimizer))
    made = kind.__new__(kind)
    left_out = {"state", "step", *(name for name in vars(optimizer) if name.endswith("_hooks"))}
    own = {name: value for name, value in vars(optimizer).items() if name not in left_out}
    hooks = {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}
    vars(made).update(copy.deepcopy(own, memo) | hooks | {"state": defaultdict(dict)})
    return made


def numbers(optimizer: Any) -> dict[str, Any]:
    """Return the plain values in the groups and in the optimizer itself."""

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
    """Return whether two plain values or tensors are equal, numbers within a relative tolerance."""
    if isinstance(one, bool | str | None) or isinstance(other, bool | str | None):
        return one == other
    return torch.allclose(torch.as_tensor(one), torch.as_tensor(other), rtol=within, atol=0.0, equal_nan=True)
