"""States of any kind: saved without a trainer, loaded, and compared to the bit."""

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.serialize import load_state
from trainer.checkpoint.snapshot import Snapshot


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    """Equal in type, order, sign of zero, NaN and every bit; a dict of any kind counts as a dict."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))
    if isinstance(a, dict):
        keys = [(type(key), key) for key in a]
        return type(b) is dict and keys == [(type(key), key) for key in b] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a, math.copysign(1, a)) == (b, math.copysign(1, b))
    return type(a) is type(b) and a == b


def save_state(folder: Path, state: dict[str, Any]) -> None:
    snapshot = Snapshot()
    files = snapshot.take(state)
    snapshot.wait()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def loaded_from(folder: Path) -> dict[str, Any]:
    return load_state(folder, os.listdir(folder))


def through(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    for old in folder.iterdir():
        old.unlink()
    save_state(folder, state)
    assert {path.suffix for path in folder.iterdir()} <= {".safetensors", ".json"}
    return loaded_from(folder)
