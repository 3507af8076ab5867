"""Reads a run's settings for loggers: every value of its config, by dotted key, without secrets."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainer.context import Context

Value = str | bool | int | float


def settings_of(trainer: Context) -> dict[str, Value]:
    """Return the values of the run's config.yaml by dotted key; without one, those of the Trainer's arguments.

    Null is the text "null". A list is its text.
    """
    file = Path(trainer.run_dir, "config.yaml")
    if file.exists():
        found: Any = OmegaConf.to_container(OmegaConf.load(file))
    else:
        names = {name: {"_target_": type(callback).__name__} for name, callback in trainer.callbacks.items()}
        found = {"batch": trainer.batch, "trainer": asdict(trainer.options), "callbacks": names}
    return dict(leaves("", found))


def leaves(key: str, value: Any) -> list[tuple[str, Value]]:
    if isinstance(value, Mapping):
        return [leaf for part, inner in value.items() for leaf in leaves(f"{key}.{part}".lstrip("."), inner)]
    plain = value if isinstance(value, str | bool | int | float) else "null" if value is None else str(value)
    return [(key, plain)]
