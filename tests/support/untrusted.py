"""What tests of security share: a recipe that reads shards, a pickle that would run, a refusal in one line."""

import os
import pickle
from pathlib import Path
from typing import Any

from support.cli import PYTHONPATH, Result, toy

# Arguments of a class of transformers that imports the module `stranger` as soon as it is asked for an attribute.
LAZY = {"name": "stranger", "module_file": "x", "import_structure": {"evil": ["export", "model", "data", "loss"]}}
SHARDED = """
import torch
from toy_recipe import Points, Toy

class Sharded(Toy):
    def __init__(self, shards: str, samples=96, width=16, depth=2, dropout=0.0, dtype="float32"):
        super().__init__(samples, width, depth, dropout, dtype)
        self.shards = shards

    def data(self, split):
        return self.shards if split == "train" else super().data(split)

    def transform(self, sample, rng):
        return sample if "x" in sample else Points(self.samples, torch.float32)[sample["cls"]]
"""


class Payload:
    """A pickle of it makes a folder when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def payload(mark: Path) -> bytes:
    """Of which a first use shows that it works."""
    content = pickle.dumps(Payload(mark), protocol=2)
    pickle.loads(content)
    mark.rmdir()
    return content


def sharded(cwd: Path, shards: str, **env: str) -> Result:
    """A run of 8 steps on `shards`, of 96 samples with a number as `cls`."""
    (cwd / "sharded.py").write_text(SHARDED)
    words = ["recipe._target_=sharded.Sharded", f"recipe.shards='{shards}'", "trainer.allow_targets=[sharded]"]
    path = f"{cwd}{os.pathsep}{PYTHONPATH}"
    return toy([*words, "trainer.max_steps=8", "trainer.run_dir=runs/r"], cwd, PYTHONPATH=path, **env)


def one_line(result: Result, code: int) -> str:
    assert (result.code, result.err.count("\n")) == (code, 1), result.err
    return result.err
