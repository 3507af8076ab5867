"""echelon new NAME: writes a small recipe of your own into the current folder, with YAML and test."""

import importlib.util
import keyword
import os
import re
import shlex
import sys
from pathlib import Path

from trainer.config.folders import CONF, choices
from trainer.errors import ConfigError, printable
from trainer.process.arguments import ArgumentParser
from trainer.process.calling import echelon, this_python
from trainer.process.exit import run_guarded

MEANT = {"Dataset", "False", "Inf", "Nan", "None", "Null", "Points", "Tensor", "True"}  # by Python, YAML or the recipe

RECIPE = '''\
"""Classifies points as inside or outside of a circle: synthetic data, to be replaced by yours."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Points(Dataset):
    """Your data: a sample may be any tensors, numbers, or dicts and tuples of them."""

    def __init__(self, samples: int, seed: int) -> None:
        self.x = torch.rand(samples, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        self.y = (self.x.norm(dim=1) < 0.8).long()  # inside of the circle: 1

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


class CLASS:
    """The three methods that every recipe has, and metrics. `recipe.width=64` sets an argument."""

    def __init__(self, samples: int = 4096, width: int = 32) -> None:
        self.samples, self.width = samples, width

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, self.width), nn.ReLU(), nn.Linear(self.width, 2))

    def data(self, split: str) -> Dataset:
        return {"train": Points(self.samples, seed=0), "val": Points(1024, seed=1)}[split]  # another split fails

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch  # (B, 2) and (B,)
        return nn.functional.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, int]]:
        """Return sums over the batch with their counts, for validation."""
        x, y = batch
        logits = model(x)
        right = (logits.argmax(1) == y).sum()
        return {"loss": (nn.functional.cross_entropy(logits, y, reduction="sum"), len(y)), "accuracy": (right, len(y))}
'''

YAML = """\
# @package _global_
# Points inside of a circle: seconds on a CPU
recipe:
  _target_: NAME.CLASS
  samples: 4096
  width: 32
batch: 64                  # samples per step, over all ranks
optimizer:
  lr: 1e-2
trainer:
  max_epochs: 5
  validate_every: 1 epochs
data:
  workers: 0               # processes that load data; more if loading is slow
"""

TEST = '''\
"""The recipe learns one batch by heart. Run it by pytest."""

import torch
from NAME import CLASS


def test_it_learns_a_batch() -> None:
    torch.manual_seed(0)
    recipe = CLASS()
    model, data = recipe.model(), recipe.data("train")
    batch = torch.utils.data.default_collate([data[i] for i in range(64)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = recipe.loss(model, batch).item()
    for _ in range(100):
        loss = recipe.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < first / 2
'''


def new(name: str) -> int:
    """Write the three files, and print them and the command that trains."""
    refuse(name)
    texts = {f"{name}.py": RECIPE, f"conf/recipe/{name}.yaml": YAML, f"test_{name}.py": TEST}
    if there := [file for file in texts if os.path.lexists(file)]:
        raise ConfigError(f"NAME={name}: {there[0]} is there already, and is not overwritten; give another name")
    try:
        for file, text in texts.items():
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            with open(file, "x") as stream:
                stream.write(text.replace("CLASS", class_of(name)).replace("NAME", name))
            print(file)
    except OSError as error:
        raise ConfigError(f"NAME={name}: {error.filename}: {error.strerror}; go to a folder of yours") from None
    print(f"\n{shlex.join(echelon())} --config-dir conf recipe={name}    # trains")
    print(f"{this_python()} -m pytest test_{name}.py")
    return 0


def class_of(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def refuse(name: str) -> None:
    key = f"NAME={printable(name)}"
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        way_out = "give lower-case letters, digits and _, a letter first, as in my_task"
        raise ConfigError(f"{key}: is not a valid recipe name; {way_out}")
    if (made := class_of(name)) in MEANT:
        raise ConfigError(f"{key}: {made} has a meaning of its own in the files; give another name")
    if name in choices("recipe", [CONF]):
        raise ConfigError(f"{key}: is a recipe of Echelon's; give another name")
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != Path.cwd()]  # a file there: see `new`
    if importlib.util.find_spec(name):
        raise ConfigError(f"{key}: is the name of a package in this environment; give another name")


def main() -> int:
    parser = ArgumentParser(prog="echelon new", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="of the recipe and its module, as in my_task")
    given = parser.parse_args()
    return run_guarded(lambda: new(given.name))


if __name__ == "__main__":
    sys.exit(main())
