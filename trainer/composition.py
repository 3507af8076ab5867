"""The callbacks that there are, the order of a run's callbacks, and their conflicts."""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

from trainer.callback import OWN, Callback, Role, Symptom, overrides
from trainer.config.folders import CONF, PACKAGE
from trainer.config.targets import LIBRARIES, locate
from trainer.errors import ConfigError

DECIDES = {
    Role.SPLIT: "how the model is split",
    Role.RECOMPUTE: "what is recomputed",
    Role.COMPILE: "how the model is compiled",
    Role.SHARD: "how parameters and gradients are laid out",
    Role.REDUCE: "how a bucket is summed",
    Role.COMPRESS: "what is sent",
    Role.SYNC: "when ranks synchronise",
    Role.OPTIMIZER: "what a step does",
    Role.AVERAGE: "how weights are averaged",
    Role.BATCH: "the next step's batch",
    Role.GUARD: "which steps are undone",
}


def present(key: Role | str, callbacks: Mapping[str, Callback], features: set[str]) -> list[str]:
    """Return the names that match `key`: a setting, the callbacks of a role, or those with a capability."""
    if isinstance(key, Role):
        return [name for name, callback in callbacks.items() if key in (callback.role, *callback.also)]
    return [key for _ in features & {key}] + [name for name, callback in callbacks.items() if key in callback.provides]


def arrange(callbacks: Mapping[str, Callback], features: set[str]) -> dict[str, Callback]:
    """Sort callbacks by role and name, whatever their order in the config, and refuse conflicts.

    Raises:
        ConfigError: The message names every conflict.
    """
    ordered = dict(sorted(callbacks.items(), key=lambda item: (item[1].role, item[0])))
    errors: list[str] = []
    owners: dict[Role, str] = {}
    rivals: set[frozenset[str]] = set()  # pairs with a role in common: one reason is enough
    for name, callback in ordered.items():
        for role in (callback.role, *callback.also):
            owner = owners.setdefault(role, name) if role in DECIDES else name
            if owner != name and ordered[owner].role not in callback.shares_with:
                errors.append(f"{owner} and {name} both decide {DECIDES[role]} (role {role.name}): leave one out")
                rivals.add(frozenset((owner, name)))
        for hook, role in (("distribute", Role.SHARD), ("split", Role.BATCH)):
            if overrides(callback, hook) and role not in (callback.role, *callback.also):
                errors.append(f"{name} has the hook {hook}: only a callback of role {role.name} may; give it that role")
    for name, callback in ordered.items():
        refused = dict(callback.conflicts)
        if overrides(callback, "on_before_optimizer_step"):
            refused["defers"] = f"{name} reads gradients before they are reduced; leave one out"
        for key, why in refused.items():
            others = [other for other in present(key, ordered, features) if frozenset((name, other)) not in rivals]
            errors += [f"{name} and {other} can't run together: {why}" for other in others if other != name]
        for key, why in callback.requires.items():
            if not present(key, ordered, features):
                errors.append(f"{name} needs {key}: {why}")
    if errors:
        raise ConfigError("; ".join(errors))
    return ordered


@functools.cache
def own_targets() -> Mapping[str, str]:
    """Return the `_target_` of each callback of Echelon's own in conf/, by name."""
    from omegaconf import OmegaConf  # which a run from Python does not need

    found: dict[str, str] = {}
    for path in sorted((CONF / "callbacks").glob("*.yaml")):
        with contextlib.suppress(Exception):  # another's file that is none of a callback
            node: Any = OmegaConf.load(path)
            found[path.stem] = str(node[path.stem]["_target_"])
    return {name: target for name, target in found.items() if OWN.match(target)}


@functools.cache
def kind_of(name: str) -> type[Callback]:
    """Return the class of Echelon's own callback of this name."""
    found: Any = locate(f"callbacks.{name}._target_", own_targets()[name], LIBRARIES)
    return found


def kinds() -> Mapping[str, type[Callback]]:
    """Return the class of each of Echelon's own callbacks by name. This imports all of them."""
    return {name: kind_of(name) for name in own_targets()}


def remedies(*symptoms: Symptom) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the callbacks that help, with the knobs to try: exact ones first, the outermost first.

    Only modules whose source names a symptom are imported, because a run asks between two steps.
    """
    names = [name for name in own_targets() if any(f"Symptom.{each.name}" in source_of(name) for each in symptoms)]
    found = [(name, kind_of(name), knobs) for name in names for symptom in symptoms
             for knobs in kind_of(name).remedies.get(symptom, ())]  # fmt: skip
    ordered = sorted(found, key=lambda each: (not each[1].exact, -each[1].role))
    return [(name, knobs) for name, _, knobs in ordered]


def source_of(name: str) -> str:
    """Return the source of a callback's module, or of its package."""
    place = PACKAGE.joinpath(*own_targets()[name].split(".")[1:3])
    files = place.glob("*.py") if place.is_dir() else [place.with_suffix(".py")]
    return "".join(file.read_text() for file in files)


def in_words(name: str, knobs: Mapping[str, Any]) -> str:
    """Return what adds a callback with these knobs, as arguments of the command."""
    return " ".join([f"'+callbacks=[{name}]'", *(f"callbacks.{name}.{key}={value}" for key, value in knobs.items())])
