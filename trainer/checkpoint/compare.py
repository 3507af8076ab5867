"""Compares settings that change a run's numbers but not its identity; a resume logs each difference."""

import json
from collections.abc import Mapping
from typing import Any

from trainer.other_words import RENAMED

SECTIONS = ("recipe", "callbacks", "optimizer", "schedule", "nccl")  # of a config


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a config into dotted keys, such as `optimizer.lr`: 0.001. `config` must contain no secrets."""
    return {key: value for section in SECTIONS for key, value in _flat(section, config[section]).items()}


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON values. Infinity and NaN, which JSON lacks, become strings."""
    return json.loads(json.dumps(settings, default=str), parse_constant=str)


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Describe how two manifests differ. A section of settings that only one of them has is not compared."""
    lines = []
    for name, prefix in (("settings", ""), ("ddp", "trainer.ddp."), ("versions", "")):
        was, now = {RENAMED.get(str(key), str(key)): value for key, value in saved.get(name, {}).items()}, own[name]
        parts = {part(key) for key in was} & {part(key) for key in now}
        for key in sorted(was.keys() | now.keys()):
            if part(key) in parts and not same(key, was.get(key), now.get(key)):
                lines.append(f"{shown(prefix + key)} was {shown(was.get(key))} and is {shown(now.get(key))}")
    return lines


def same(key: str, was: Any, now: Any) -> bool:
    """Compare two values of a setting. Echelon's own classes may have moved to another module since."""
    if key.endswith("._target_") and all(str(name).startswith("trainer.") for name in (was, now)):
        return was.rpartition(".")[2] == now.rpartition(".")[2]
    return was == now


def part(key: str) -> str:
    return key.rpartition(".")[0]


def shown(value: Any) -> str:
    """Format a value as one short line without control characters, because the checkpoint may be untrusted."""
    text = json.dumps(value)
    text = text[1:-1] if isinstance(value, str) else text
    return text if len(text) < 100 else f"{text[:97]}..."


def _flat(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {key: value}
    return {name: leaf for part, inner in value.items() for name, leaf in _flat(f"{key}.{part}", inner).items()}
