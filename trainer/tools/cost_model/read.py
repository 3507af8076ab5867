"""Reads a choice: builds its callbacks, asks each for its cost, and names what the model leaves out."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainer.callback import Callback, Role
from trainer.config.build import build
from trainer.config.folders import CONF
from trainer.config.options import DataOptions, Options
from trainer.config.schema import option_parameters
from trainer.config.targets import LIBRARIES, in_conf, locate
from trainer.cost.machine import Machine
from trainer.cost.setup import ALGORITHMS, Cost, Setup
from trainer.cost.workload import Choice, Workload
from trainer.errors import ConfigError, nearest

READ = frozenset({
    "batch", "micro_batch", "accumulate", "trainer.ddp.bucket_mib", "trainer.ddp.gradient_as_bucket_view",
    "trainer.precision", "data.workers",
})  # fmt: skip
UNMODELLED = "its time is not modelled"
QUIET = ("trainer.checkpoint.", "trainer.max_", "trainer.log_", "trainer.validate_", "data.prefetch", "data.cache")


def read(machine: Machine, workload: Workload, choice: Choice, batch: int) -> Setup:
    """Check a choice against the YAMLs and options of this version, and ask its callbacks for their costs."""
    found, unknown = costs_of(choice.callbacks, choice.allow), list[str]()
    for name, cost in found.items():
        if why := cost.left_out if cost else UNMODELLED:
            unknown.append(f"callbacks.{name}: {why}")
    costs = {name: cost for name, cost in found.items() if cost}
    for key, value in choice.settings.items():
        unknown += setting(key, value)
    codecs = {cost.codec_name for cost in costs.values() if cost.codec_name} - machine.codecs.keys()
    unknown += [f"codec {name}: its cost is not measured, and is taken as 0" for name in sorted(codecs)]
    if precision := choice.settings.get("trainer.precision"):
        unknown.append(f"trainer.precision={precision}: its factor on the passes is not measured, and is taken as 1")
    setup = Setup(machine, workload, batch, costs, choice.settings)
    for cost in costs.values():
        unknown += cost.unknown(setup)
    if machine.ranks % setup.stages:
        name = next(name for name, cost in costs.items() if cost.stages == setup.stages)
        raise ConfigError(f"callbacks.{name}.stages={setup.stages}: does not divide {machine.ranks} rank(s)")
    if not workload.parameters or batch < 1:
        raise ConfigError(f"batch={batch}, {len(workload.parameters)} parameters: give at least one of each")
    return replace(setup, unknown=tuple(unknown))


def costs_of(callbacks: Mapping[str, Mapping[str, Any]], allow: tuple[str, ...]) -> dict[str, Cost | None]:
    """Return the cost of each callback; None if it is not modelled.

    `callbacks` has the knobs of each, and the `_target_` of those from elsewhere. A `_target_` may name the packages in
    `allow`.
    """
    return {name: cost_of(name, Knobs(given), allow) for name, given in callbacks.items()}


class Knobs(dict[str, Any]):
    """A callback's knobs, hashable as the key of a cache."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(repr(self))


@functools.lru_cache(maxsize=1024)  # a search asks for the same ones thousands of times
def cost_of(name: str, given: Knobs, allow: tuple[str, ...]) -> Cost | None:
    node, key, allowed = whole_node(name, given), f"callbacks.{name}", (*LIBRARIES, *allow)
    if node is None:
        return None
    kind: Any = locate(f"{key}._target_", node["_target_"], allowed)
    if getattr(kind, "cost", None) is Callback.cost and kind.role >= Role.MEASURE:
        return Cost() if in_conf(node["_target_"]) else None  # not built: it might open files, or need a library
    try:
        cost = build(key, node, allowed).cost()
    except ConfigError:
        raise
    except Exception as error:  # a user's
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{key}: has no cost ({reason}); correct its constructor or its cost()") from None
    if not isinstance(cost, Cost | None):
        raise ConfigError(f"{key}.cost(): returned {type(cost).__name__}; return a trainer.cost.setup.Cost, or None")
    return cost


def whole_node(name: str, given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return `_target_` and all knobs of a callback; None if neither the knobs nor conf/ have its `_target_`."""
    known = defaults(name)
    if known is None or given.get("_target_", known["_target_"]) != known["_target_"]:
        return given if "_target_" in given else None
    for knob in given.keys() - known.keys():
        knobs_of = known.keys() - {"_target_"}
        raise ConfigError(f"callbacks.{name}.{knob}={given[knob]}: no such knob; {nearest(knob, knobs_of)}")
    return {**known, **given}


@functools.cache
def defaults(callback: str) -> Mapping[str, Any] | None:
    """Return a callback's YAML, with `_target_`; None if there is none."""
    from omegaconf import OmegaConf

    path = CONF / "callbacks" / f"{callback}.yaml"
    if not path.is_file():
        return None
    found: Any = OmegaConf.to_container(OmegaConf.load(path))
    return found[callback]


def setting(key: str, value: Any) -> list[str]:
    """Return what the prediction leaves out of a setting. Raises ConfigError for an unknown key."""
    if key in READ or key.startswith(QUIET):
        return []
    if key.startswith("nccl."):
        return [] if key == "nccl.algo" and value in (None, *ALGORITHMS) else [f"{key}={value}: is not modelled"]
    if key not in settings_of():
        raise ConfigError(f"{key}={value}: no such setting; {nearest(key, settings_of())}")
    return [f"{key}={value}: {UNMODELLED}"]


@functools.cache
def settings_of() -> frozenset[str]:
    keys = {*READ}
    for prefix, options in (("trainer", Options), ("data", DataOptions)):
        for name, known in option_parameters(options).items():
            inner = option_parameters(known.annotation) if hasattr(known.annotation, "__dataclass_fields__") else {}
            keys |= {f"{prefix}.{name}.{each}" for each in inner} or {f"{prefix}.{name}"}
    return frozenset(keys)
