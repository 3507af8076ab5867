"""Hydra's errors in one line: key, reason, way out."""

import difflib
import re
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf

GROUPS = ("recipe", "callbacks", "optimizer", "schedule")


def explain(error: Exception, arguments: list[str], conf: Path) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return f"{group or 'config'}={name}: there is no such {group or 'config'}; " + nearest(
            name, list(error.options or [])
        )
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not KEY=VALUE as Hydra reads it ({text}); quote it for the shell, as in '+callbacks=[a,b]'"
    key = re.search(r"Could not (?:override|append to config|delete(?: from config)?)[^']*'([^']+)'", text)
    if key is None:
        return text
    return f"{key[1].split('=')[0]}: no such key; " + suggest(key[1].split("=")[0], arguments, conf)


def nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, 3, 0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(names))}"


def suggest(key: str, arguments: list[str], conf: Path) -> str:
    """The nearest key of the config that the chosen groups make."""
    chosen = [a for a in arguments if a.partition("=")[0] in GROUPS]
    keys: list[str] = []
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf), version_base="1.3"):
            flatten(compose("config", overrides=chosen), "", keys)
    except HydraException:
        return "see --cfg job"
    parts = key.split(".")
    if parts[0] == "callbacks" and len(parts) > 1 and not any(k.startswith(f"callbacks.{parts[1]}") for k in keys):
        if (conf / "callbacks" / f"{parts[1]}.yaml").exists():
            return f"this run has no {parts[1]}; add '+callbacks=[{parts[1]}]'"
        return nearest(parts[1], [path.stem for path in (conf / "callbacks").glob("*.yaml")])
    siblings = [k for k in keys if k.rpartition(".")[0] == key.rpartition(".")[0]]
    near = difflib.get_close_matches(key, siblings, 3, 0.5) or difflib.get_close_matches(key, keys, 3, 0.5)
    return f"did you mean {' or '.join(near)}?" if near else "see all by --cfg job --resolve"


def flatten(node: DictConfig, prefix: str, keys: list[str]) -> None:
    for name in node:
        key = f"{prefix}.{name}".lstrip(".")
        keys.append(key)
        if OmegaConf.is_dict(node) and not OmegaConf.is_missing(node, name) and isinstance(node[name], DictConfig):
            flatten(node[name], key, keys)
