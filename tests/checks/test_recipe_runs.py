"""Mistakes in a recipe of one's own: the command ends with one line that names the method, what came, the way out."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import indent

import pytest
from support.cli import Result, run
from support.quick import one_of, selected

CONFIG = """\
# @package _global_
recipe: {_target_: mine.Wrong}
batch: 8
trainer: {max_steps: 4, log_every_steps: 1, run_dir: runs/r, restarts: 0, accelerator: cpu, allow_targets: [mine]}
data: {workers: 0}
"""
RECIPE = """\
import glob

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __init__(self, size=64):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        x = torch.linspace(0, i / 64, 4)
        return x, x.sum(0, keepdim=True)


class Endless(Dataset):
    def __getitem__(self, i):
        return torch.zeros(4), torch.zeros(1)


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        return self.used(x)


class Mine:
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def data(self, split):
        return Numbers()

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x), y)


class Wrong(Mine):
"""
# The name of a mistake, after words that are typed, if any. Below it the method; after "|", what the line must say.
TABLE = """
no return in model
    def model(self):
        nn.Linear(4, 1)
    | recipe.model(): returned None; return an nn.Module
a class for a model
    def model(self):
        return nn.Identity
    | recipe.model(): returned the class Identity, not an object of it; return an nn.Module
nothing trains
    def model(self):
        return super().model().requires_grad_(False)
    | recipe.model(): all 4 parameters are frozen; return one with parameters that require a gradient
no return in loss
    def loss(self, model, batch):
        nn.functional.mse_loss(model(batch[0]), batch[1])
    | recipe.loss(): returned None; return a tensor of one number, the mean over the batch; a function without `return`
a loss of each sample
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square()
    | recipe.loss(): returned a tensor of shape (8, 1); return a tensor of one number, the mean over the batch
a loss in a dict
    def loss(self, model, batch):
        return {"mse": super().loss(model, batch), "accuracy": 0.5}
    | recipe.loss(): returned a value of type dict; return the tensor 'loss', and for each other name a tensor of one
    | number, or a number
a detached loss
    def loss(self, model, batch):
        return super().loss(model, batch).detach()
    | recipe.loss(): returned a tensor of shape () without a gradient; return a loss with a gradient, without detach()
the losses of all steps
    def loss(self, model, batch):
        self.total = getattr(self, "total", 0.0) + super().loss(model, batch)
        return self.total
    | recipe.loss(): its graph is freed already; keep tensors of earlier batches by detach(), and leave backward() to
no loss of a later batch
    def loss(self, model, batch):
        self.calls = getattr(self, "calls", 0) + 1
        return super().loss(model, batch) if self.calls < 3 else None
    | recipe.loss(): returned None; return a tensor of one number
    | (in step 3, on sample
a change in place
    def loss(self, model, batch):
        hidden = model[1](model[0](batch[0]))
        hidden += 1.0
        return model[2](hidden).square().mean()
    | recipe.loss(): a tensor that the backward pass needs was changed in place; write x = x + y instead of x += y
a mean without its count
    def metrics(self, model, batch):
        return {"mse": nn.functional.mse_loss(model(batch[0]), batch[1])}
    | recipe.metrics(): returned a tensor of shape () for 'mse'; return a dict of name -> (sum, count)
no metrics
    def metrics(self, model, batch):
        return {}
    | recipe.metrics(): returned an empty dict for each batch; return a dict of name -> (sum, count)
no return in transform
    def transform(self, sample, rng):
        sample[0].add_(1.0)
    | : is None; return the sample from recipe.transform()
no return in collate
    def collate(self, samples):
        torch.utils.data.default_collate(samples)
    | recipe.collate(): returned None; return the batch
data.workers=1: a batch that no worker can send
    def collate(self, samples):
        return (*torch.utils.data.default_collate(samples), lambda: samples)
    | data.workers: a worker can't send the batch (
    | let transform() or collate() return tensors, numbers and strings, or give data.workers=0
a share for a weight
    def weight(self, batch):
        return len(batch[0]) / 16
    | recipe.weight(): returned 0.5; return the number of items, an int of 0 or more
no length
    def data(self, split):
        return Endless()
    | recipe.data('train'): Endless has no length; define __len__, or return an IterableDataset
a list of samples
    def data(self, split):
        return [Numbers()[i] for i in range(64)]
    | recipe.data('train'): a batch has 4 samples, and this run's micro-batch is 8
    | . For a list of samples, return a Dataset
nothing to validate on
    def data(self, split):
        return Numbers() if split == "train" else DataLoader(Numbers(4), 8, drop_last=True)
    | recipe.data('val'): gave no batch
no files
    def data(self, split):
        return glob.glob("nowhere/*.tar")
    | recipe.data('train'): returned an empty list; return shards, a Dataset, or an iterable of batches
samples of several shapes
    def transform(self, sample, rng):
        return torch.zeros(int(rng.integers(1, 1000)))
    | : does not fit into a batch (
    | give samples of one shape and of tensors, arrays or numbers, or give `collate`
a method for a number
    def tokens_per_sample(self):
        return 128
    | recipe.tokens_per_sample: is a value of type method; make it a number, or a method with @property
a loss that is never finite
    def loss(self, model, batch):
        return super().loss(model, batch) * float("nan")
    | train/loss was finite at no logged step up to step 1; lower optimizer.lr, or check the data or the loss
trainer.devices=2: parameters that the loss does not use
    def model(self):
        return Spare()
    | recipe.loss(): does not use spare.weight, spare.bias, and other ranks wait for the gradients
    | give trainer.ddp.find_unused_parameters=true
"""
LATER = ("the losses of all steps", "no loss of a later batch")  # step 1 is right
CODES = {"a loss that is never finite": 70, "a list of samples": 71}
CODES |= dict.fromkeys(("nothing to validate on", "no files"), 71)


def parse(table: str) -> dict[str, tuple[str, list[str]]]:
    cases: dict[str, tuple[list[str], list[str]]] = {}
    for line in filter(None, table.splitlines()):
        if not line.startswith(" "):
            cases[line] = [], []
        elif line.startswith("    | "):
            list(cases.values())[-1][1].append(line[6:])
        else:
            list(cases.values())[-1][0].append(line[4:])
    return {name: ("\n".join(code), said) for name, (code, said) in cases.items()}


CASES = parse(TABLE)
pytestmark = pytest.mark.timeout(300)  # the first test waits for all runs


def make(folder: Path, code: str) -> Path:
    (folder / "mine.py").write_text(RECIPE + indent(code, "    ") + "\n")
    (folder / "conf" / "recipe").mkdir(parents=True)
    (folder / "conf" / "recipe" / "mine.yaml").write_text(CONFIG)
    return folder


def train(folder: Path, *more: str) -> Result:
    words = ["--config-dir", "conf", "recipe=mine", "~callbacks.tensorboard", "~callbacks.advice", *more]
    return run(words, folder)


@pytest.fixture(scope="module")
def results(request, tmp_path_factory) -> dict[str, tuple[Result, Path]]:
    def one(name: str) -> tuple[Result, Path]:
        folder = make(tmp_path_factory.mktemp("mine"), CASES[name][0])
        typed = name.partition(": ")[0] if "=" in name else ""
        return train(folder, *typed.split()), folder

    with ThreadPoolExecutor(2) as pool:
        names = selected(request, "name")
        return dict(zip(names, pool.map(one, names)))


@pytest.mark.parametrize("name", one_of(4, CASES))
def test_one_line_says_it(results, name):
    result, folder = results[name]
    assert len(result.err.splitlines()) == 1, result.err
    assert result.err.startswith("echelon: ")
    assert not [text for text in CASES[name][1] if text not in result.err], result.err
    assert "Traceback" not in result.out
    assert result.code == CODES.get(name, 78)
    if name == "a loss that is never finite":
        summary = json.loads((folder / "runs/r/summary.json").read_text())
        assert (summary["stopped"], summary["steps"], summary["error"]) == ("not finite", 1, result.err.strip())
        assert "val/loss" in summary and not list((folder / "ckpt" / "r").glob("step-*"))
    elif name not in LATER:
        assert not (folder / "ckpt").exists() or not list((folder / "ckpt").glob("*/step-*"))
        assert '"train/loss"' not in "".join(path.read_text() for path in folder.glob("runs/*/metrics.jsonl"))
