"""Checks a composed config against the signatures of constructors, before torch is imported."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Set
from typing import Any

from trainer.annotated import PositiveInt, as_yaml, checked, is_node, takes_node
from trainer.comm.nccl import NCCLOptions
from trainer.config.build import arguments, build, build_options
from trainer.config.folders import CONF
from trainer.config.options import DataOptions, Options
from trainer.config.parameter_groups import check_groups
from trainer.config.schema import ANY_NAME, NO_DEFAULT, Knob, constant, knobs, option_parameters
from trainer.config.targets import LIBRARIES, refuse_nested, refuse_package, refuse_target
from trainer.config.tuned import Tuned
from trainer.errors import ConfigError, nearest
from trainer.other_words import new_name, our_key
from trainer.redact import HIDDEN, children, redact, redacted_keys

TOP = ("recipe", "callbacks", "optimizer", "schedule", "batch", "micro_batch", "accumulate", "trainer", "data", "nccl")
GROUPS = ("optimizer", "schedule")
TUNED = "tuned"  # the one optional key, which a result of trainer.tools.tune has

# If a recipe's YAML names another optimizer, it is merged over the default one, whose keys remain.
OWN_CHOICE = "for your own {0} write conf/{0}/NAME.yaml, and in the recipe's defaults 'override /{0}: NAME'"
STAGES = {"decoders": ("extension", "bytes"), "map": ("sample",)}  # of `data`: lists of functions -> their arguments


def check(config: dict[str, Any], allowed: tuple[str, ...] = LIBRARIES) -> None:
    """Check that every key is known, that every value has a valid type and range, and that nothing is missing.

    A whole number such as 1e3 becomes an int in `config` where an int is expected. A `_target_` may name the packages
    `allowed`, and those in trainer.allow_targets.
    """
    if hidden := redacted_keys(config):
        raise ConfigError(f"{hidden[0]}={HIDDEN}: is a secret that was not printed; give its value")
    for key in config:
        if key not in (*TOP, TUNED):
            raise ConfigError(f"{key}={shown(key, config[key])}: no such key; {nearest_anywhere(key, config)}")
    for key in TOP:
        if key not in config:
            raise ConfigError(f"{key}: is missing, and every run needs it; give {key}=VALUE")
    refuse_missing(config, "")
    for key in ("batch", "micro_batch", "accumulate"):
        config[key] = check_type(key, config[key], PositiveInt if key == "batch" else PositiveInt | None)
    check_type("callbacks", config["callbacks"], dict)
    for key, options in (("trainer", Options), ("data", DataOptions), ("nccl", NCCLOptions)):
        check_values(key, config[key], option_parameters(options))
        build_options(options, config[key])  # refuses values out of range
    check_tuned(config.get(TUNED))
    allow = (*allowed, *config["trainer"].get("allow_targets", ()))
    for name, node in config["callbacks"].items():
        if not isinstance(node, Mapping) or "_target_" not in node:
            raise ConfigError(absent_callback(name, config["callbacks"].keys() - {name}))
        check_node(f"callbacks.{name}", node, allow)
    check_stages(config["data"], allow)
    for key in ("recipe", "optimizer", "schedule"):
        check_node(key, config[key], allow)
    build("schedule", config["schedule"], allow)  # refuses values out of range, and imports no torch


def absent_callback(name: str, others: Set[str]) -> str:
    known = {path.stem for path in (CONF / "callbacks").glob("*.yaml")}
    near = difflib.get_close_matches(name, others, 1, 0.8)
    if near:
        fix = f"did you mean callbacks.{near[0]}?"
    elif name in known:
        fix = f"'+callbacks=[{name}]' adds it"
    else:
        fix = our_key(name) or f"{nearest(name, known)} '+callbacks=[NAME]' adds a callback"
    return f"callbacks.{name}: is not in this run, which has {', '.join(sorted(others))}; {fix}"


def check_tuned(values: Any) -> None:
    if values is None:
        return
    check_values(TUNED, values, option_parameters(Tuned))
    for key in option_parameters(Tuned).keys() - values.keys():
        raise ConfigError(f"{TUNED}.{key}: is missing; let echelon tune write the file again")


def nearest_anywhere(key: str, config: Mapping[str, Any]) -> str:
    """Return the fix for an unknown key: it may belong to a section, be misspelt, or be another trainer's word."""
    sections = [name for name in TOP if isinstance(config.get(name), Mapping)]
    if not any(key in config[name] for name in sections) and (ours := our_key(key)):
        return ours
    names = [(name, name) for name in TOP] + [(name, f"{part}.{name}") for part in sections for name in config[part]]
    near = difflib.get_close_matches(key, {name for name, _ in names}, 3, 0.75)
    found = [full for name, full in names if name in ({key} if key in near else near)]
    return f"did you mean {' or '.join(found)}?" if found else nearest(key, TOP)


def refuse_missing(node: Any, key: str) -> None:
    if node == "???":
        raise ConfigError(f"{key}=???: has no default; give {key}=VALUE")
    for name, value in children(node):
        refuse_missing(value, f"{key}.{name}".lstrip("."))


def check_node(key: str, node: Any, allow: tuple[str, ...]) -> None:
    if isinstance(node, Mapping) and isinstance(node.get(key), Mapping):
        raise ConfigError(
            f"{key}.{key}: is one level too deep; begin the YAML file with the line '# @package _global_'"
        )
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigError(f"{key}={shown(key, node)}: has no _target_; choose {key}=NAME, see --help")
    target = node["_target_"]
    check_type(f"{key}._target_", target, str)
    if "." not in target:
        raise ConfigError(f"{key}._target_={target}: is not a full name; write package.module.Name")
    refuse_target(f"{key}._target_", target, allow)
    known = knobs(key, target, allow)
    for name, value in arguments(node).items():
        if is_node(value) and name in known and takes_node(known[name].annotation):
            check_node(f"{key}.{name}", value, allow)
        else:
            refuse_nested(f"{key}.{name}", value)
    if key in GROUPS and node.get("_partial_") and known and next(iter(known.values())).default is NO_DEFAULT:
        known = dict(list(known.items())[1:])  # its first argument, the groups of parameters, is no key
    if key == "optimizer":
        groups, node = split_groups(node)
        types = {name: knob.annotation for name, knob in known.items()}
        check_groups("optimizer.groups", groups or [], known=None if ANY_NAME in known else types)
    own = key in GROUPS and not target.startswith("trainer.")
    check_values(key, arguments(node), known, f"; {OWN_CHOICE.format(key)}" if own else "")
    refuse_classes(key, node, allow)
    for name, knob in known.items():
        if knob.default is NO_DEFAULT and name not in node and name != ANY_NAME and not node.get("_partial_"):
            raise ConfigError(f"{key}.{name}: is missing; give {key}.{name}=VALUE")


def refuse_classes(key: str, node: Mapping[str, Any], allow: tuple[str, ...]) -> None:
    """Refuse arguments, listed in a class's `targets`, that name a class in a package that is not allowed."""
    for name, value in class_arguments(node):
        refuse_package(f"{key}.{name}", value, value, allow)


def class_arguments(node: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the arguments of a node that name classes, and their values."""
    for name in constant(node["_target_"], "targets") or ():
        if isinstance(value := node.get(name), str):
            yield name, value


def split_groups(node: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    return node.get("groups"), {name: value for name, value in node.items() if name != "groups"}


def check_stages(data: Mapping[str, Any], allow: tuple[str, ...]) -> None:
    for key in STAGES:
        for i, item in enumerate(data.get(key, ())):
            check_node(f"data.{key}.{i}", stage_node(f"data.{key}.{i}", item), allow)


def stage_node(key: str, item: Any) -> Mapping[str, Any]:
    """Convert an item of `data.decoders` or `data.map` to a node; a plain name is a function without arguments."""
    if isinstance(item, str):
        return {"_target_": item, "_partial_": True}
    if not isinstance(item, Mapping) or "_target_" not in item:
        raise ConfigError(f"{key}={shown(key, item)}: must be the name of a function, or a _target_ with its arguments")
    return item


def check_values(key: str, values: Any, known: Mapping[str, Knob], hint: str = "") -> None:
    check_type(key, values, dict)
    for name, value in values.items():
        if name not in known and ANY_NAME not in known:
            full = f"{key}.{name}"
            ours = key in ("trainer", "data") and our_key(name)
            near = difflib.get_close_matches(name, known, 1, 0.8)
            fix = new_name(full) or ours or ("" if near else elsewhere(key, name))
            raise ConfigError(f"{full}={shown(name, value)}: no such key; {fix or nearest(name, known)}{hint}")
        kind = known[name].annotation if name in known else Any
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            check_values(f"{key}.{name}", value, option_parameters(kind))
        else:
            values[name] = check_type(f"{key}.{name}", value, kind)


def elsewhere(key: str, name: str) -> str:
    """Return the fix for a key of section `key` that belongs to another; empty if none has it."""
    sections = {"trainer": option_parameters(Options), "data": option_parameters(DataOptions)}
    sections |= {"optimizer": ("lr", "weight_decay"), "schedule": ("warmup", "floor")}  # of most of them
    found = [f"{section}.{name}" for section, names in sections.items() if section != key and name in names]
    found = [name] if name in TOP else found
    return f"did you mean {found[0]}?" if found else ""


def check_type(key: str, value: Any, kind: Any) -> Any:
    return checked(key, value, kind, shown(key, value))


def shown(key: str, value: Any) -> str:
    """Format a value as YAML, without secrets."""
    return as_yaml(redact({key: value})[key])
