"""Checks settings for parameter groups: `optimizer.groups` in a config, or a recipe's own."""

from collections.abc import Mapping
from typing import Any

from trainer.annotated import describe, fits
from trainer.errors import ConfigError, nearest, require

OWN = {"lr_scale": float, "freeze": bool, "hidden": bool}  # settings in addition to the optimizer's own
NOT_SETTINGS = ("match", "params")


def check_groups(key: str, groups: Any, by: str = "match", known: Mapping[str, Any] | None = None) -> None:
    """Check groups: a list of mappings, each of which selects its parameters by the key `by`: `match` or `params`.

    `known` has the optimizer's settings with their types, if they are known yet.
    """
    if not isinstance(groups, list | tuple):
        raise ConfigError(f"{key}={groups}: must be a list of groups, such as [{{match: 'encoder.*', lr_scale: 0.1}}]")
    for i, group in enumerate(groups):
        if not isinstance(group, Mapping) or by not in group:
            raise ConfigError(f"{key}.{i}={group}: must be a mapping with the key {by}, of the parameters it is for")
        if by == "match" and not (group["match"] and fits(group["match"], str | list[str])):
            raise ConfigError(f"{key}.{i}.match={group['match']}: must be a pattern of names, or a list of patterns")
        for name, value in group.items():
            if name != by:
                _check_setting(f"{key}.{i}.{name}", name, value, known)
        if group.get("freeze") and (others := settings(group) - {"freeze"}):
            raise ConfigError(
                f"{key}.{i}.{sorted(others)[0]}: has no effect on frozen parameters; leave it or freeze out"
            )
        if "lr" in group and "lr_scale" in group:
            raise ConfigError(f"{key}.{i}.lr_scale: scales optimizer.lr, and the group has its own lr; leave one out")


def settings(group: Mapping[str, Any]) -> set[str]:
    return {name for name in group if name not in NOT_SETTINGS}


def _check_setting(key: str, name: str, value: Any, known: Mapping[str, Any] | None) -> None:
    kind = OWN.get(name) or (known or {}).get(name, Any)
    if known is not None and name not in OWN and name not in known:
        names = {"match", *OWN, *known}
        raise ConfigError(f"{key}={value}: no such setting of a group; {nearest(name, names)}")
    if not fits(value, kind):
        raise ConfigError(f"{key}={value}: must be {describe(kind)}, not {describe(type(value))}")
    if name == "lr_scale":
        require(key, value, at_least=0, below=float("inf"))
