"""Writes the result: a Hydra overlay for `+tuned=NAME`, with the evidence as comments."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainer.config.tuned import Tuned
from trainer.cost.machine import Link
from trainer.cost.workload import Choice
from trainer.errors import ConfigError, printable
from trainer.files import write_whole
from trainer.tools.cost_model.read import defaults

CLASSES = (10e6, 100e6, 1e9, 2.5e9, 10e9, 25e9, 40e9, 100e9, 200e9, 400e9, 800e9)  # bit/s, as networks are sold


def overlay(config: Mapping[str, Any], choice: Choice, tuned: Tuned, evidence: Sequence[str]) -> str:
    """Return the text of the overlay that turns today's config into that of the choice.

    New callbacks have all their knobs: a list of defaults would yield to a command's list `+callbacks=[...]`.
    """
    content, known = OmegaConf.create(), config["callbacks"]
    if choice.callbacks:
        knobs = {
            name: {**({} if name in known else defaults(name) or {}), **own} for name, own in choice.callbacks.items()
        }
        content.callbacks = {name: own for name, own in knobs.items() if own}
    for key, value in choice.settings.items():
        OmegaConf.update(content, key, value, force_add=True)
    content.tuned = dataclasses.asdict(tuned)
    comments = "".join(f"# {printable(line)}\n" for line in evidence)
    return f"# @package _global_\n{comments}{OmegaConf.to_yaml(content)}"


def refuse_others(folder: Path, name: str) -> None:
    """Refuse to replace a file that is not the result of a search."""
    path = folder / "tuned" / f"{name}.yaml"
    if os.path.lexists(path) and not (path.is_file() and re.search(rb"(?m)^tuned:$", path.read_bytes())):
        raise ConfigError(f"{path}: is a file that Echelon did not write; give another tune.name")


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / "tuned" / f"{name}.yaml"
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror}; give another --config-dir") from None
    return path


def link_class(link: Link, ranks: int) -> str:
    """Return the class of network that a link's rate belongs to: the lowest that it exceeds by at most a tenth."""
    rate = link.bytes_per_s * 8
    if ranks == 1:
        return "none"
    sold = next((each for each in CLASSES if rate <= each * 1.1), None)
    if sold is None:
        return "more than 800 Gbit/s"
    return f"{sold / 1e9:g} Gbit/s" if sold >= 1e9 else f"{sold / 1e6:g} Mbit/s"


def file_name(recipe: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(recipe)).strip("-.") or "run"
