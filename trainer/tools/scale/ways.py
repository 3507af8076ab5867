"""The ways to train that a table compares. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

VIEW = {"trainer.ddp.gradient_as_bucket_view": True}  # the default on CUDA


@dataclass(frozen=True)
class Way:
    """Callbacks with their knobs, and settings. `allow` is the run's `trainer.allow_targets`."""

    callbacks: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any]
    allow: tuple[str, ...] = ()


def load() -> dict[str, Way]:
    found: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("ways.yaml")))
    return {name: Way(each.get("callbacks", {}), {**VIEW, **each.get("settings", {})}) for name, each in found.items()}


WAYS = load()
