"""Writes a model for others to load."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn


def write_model(model: nn.Module, folder: Path, about: Mapping[str, Any]) -> None:
    """Write the weights as model.safetensors, and `about` as config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(about, indent=2) + "\n")
