"""What a run's numbers depend on beside its identity, as the manifest has it: a resume takes another, and says so."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.trainer import Trainer


OPTIONS = ("precision", "deterministic", "max_steps", "max_epochs", "clip_norm")  # of `trainer`: what changes weights


SECTIONS = ("recipe", "callbacks", "optimizer", "schedule", "nccl")  # of a config


def own(trainer: "Trainer") -> dict[str, Any]:
    """What a trainer knows of itself, made in Python or by a command."""
    plan = trainer.plan
    return {
        "micro_batch": plan.micro,
        "accumulate": plan.accumulate,
        "trainer.accelerator": trainer.device.type,
        "trainer.backend": trainer.ranks.backend,
        **{f"trainer.{name}": getattr(plan.options, name) for name in OPTIONS},
    }


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that only a command knows, as `optimizer.lr`: 0.001. Give it one without secrets."""
    return {key: value for section in SECTIONS for key, value in _flat(section, config[section]).items()}


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON has them, which has no infinity."""
    return json.loads(json.dumps(settings, default=str), parse_constant=str)


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Of two manifests, in words. What one of them alone has is told where both have others of its part."""
    lines = []
    for name, prefix in (("settings", ""), ("ddp", "trainer.ddp."), ("versions", "")):
        was, now = saved.get(name, {}), own[name]
        parts = {part(key) for key in was} & {part(key) for key in now}
        for key in sorted(was.keys() | now.keys()):
            if part(key) in parts and not same(key, was.get(key), now.get(key)):
                lines.append(f"{shown(prefix + key)} was {shown(was.get(key))} and is {shown(now.get(key))}")
    return lines


def same(key: str, was: Any, now: Any) -> bool:
    """Our own classes and functions may lie in another module than when the checkpoint was written."""
    if key.endswith("._target_") and all(str(name).startswith("trainer.") for name in (was, now)):
        return was.rpartition(".")[2] == now.rpartition(".")[2]
    return was == now


def part(key: str) -> str:
    return key.rpartition(".")[0]


def shown(value: Any) -> str:
    """On one line, and without what a terminal obeys: a checkpoint may be anybody's."""
    text = json.dumps(value)
    text = text[1:-1] if isinstance(value, str) else text
    return text if len(text) < 100 else f"{text[:97]}..."


def _flat(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {key: value}
    return {name: leaf for part, inner in value.items() for name, leaf in _flat(f"{key}.{part}", inner).items()}
