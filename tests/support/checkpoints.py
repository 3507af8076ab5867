"""Checkpoints without a trainer: files full of one byte, written by the code under test, and read without it."""

from pathlib import Path
from typing import Any

from trainer.checkpoint.commit import begin, commit, publish
from trainer.checkpoint.locate import checkpoints
from trainer.checkpoint.manifest import MANIFEST

NAMES = ("model.safetensors", "state.json")


def put(run: Path, step: int, fill: int | None = None, **manifest: Any) -> Path:
    content = memoryview(bytes([step if fill is None else fill]) * 5000)
    attempt = begin(run)
    written = commit(run, step, dict.fromkeys(NAMES, content), manifest, attempt)
    publish(written, attempt)
    return written


def holds(checkpoint: Path) -> tuple[int, int]:
    """Step by its name, and the byte that its files are full of: read without the code under test."""
    contents = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != MANIFEST}
    first = contents[NAMES[0]][:1]
    assert contents.keys() >= set(NAMES) and set(contents.values()) == {first * 5000}
    return int(checkpoint.name.removeprefix("step-")), first[0]


def steps(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoints(run)]


def hidden(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if path.name.startswith("."))
