"""Checks the contract of a callback on real ranks, by comparing runs with it and without it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from trainer.callback import Callback
from trainer.checkpoint.manifest import verify
from trainer.checkpoint.parts import open_parts, read_all
from trainer.checkpoint.serialize import load_state
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.process.environment import Place
from trainer.testing.ranks import run_ranks
from trainer.trainer import Trainer

ROUNDING = 1e-12  # of an update in float64, relative in the L2 norm
NAME = "callback"  # in the runs


class Points(Dataset[dict[str, Tensor]]):
    """Synthetic float64 data: points, a smooth function of them, and a mask with 1 to 4 of the 4 outputs."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x = torch.rand(8, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        return {"x": x, "y": torch.sin(3 * x[:4]), "mask": (torch.arange(4) <= i % 4).double()}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.dropout(torch.tanh(block(x)), 0.1, self.training)
        return self.last(x)


class SmallRecipe:
    """A network with dropout, whose micro-batches have unequal weights."""

    def model(self) -> nn.Module:
        return Network()

    def data(self, split: str) -> Points:
        return Points()

    def weight(self, batch: Mapping[str, Tensor]) -> int:
        return int(batch["mask"].sum())

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        error = (model(batch["x"]) - batch["y"]).square() * batch["mask"]
        return error.sum() / batch["mask"].sum()


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.5)


@dataclass(frozen=True)
class Runs:
    """The training runs of a check."""

    make: Callable[[], Callback]
    recipe: Callable[[], Any]
    optimizer: Callable[[Any], Optimizer]
    batch: int
    steps: int
    options: Mapping[str, Any]

    def train(self, place: Place, name: str, accumulate: int, own: bool, resume: str | None = None) -> dict[str, float]:
        options = {"max_steps": self.steps, "log_every_steps": 1, "check_replicas_every": 1, **self.options}
        checkpoint = CheckpointOptions(every_steps=self.steps // 2, keep=3)
        trainer = Trainer(
            self.recipe(), {NAME: self.make()} if own else {}, self.optimizer, batch=self.batch, accumulate=accumulate,
            options=Options(**options, run_dir=f"runs/{name}", resume=resume, checkpoint=checkpoint, accelerator="cpu"),
            data=DataOptions(workers=0, shuffle_shards=5, shuffle_window=4),
            place=replace(place, store=f"{place.store}-{name}"),
        )  # fmt: skip
        trainer.fit()
        return trainer.validation

    def on_rank(self, place: Place, folder: Path) -> dict[str, Any]:
        """Train without the callback, with it, and with it from half of the steps on; return the differences."""
        half, reports = f"step-{self.steps // 2:08d}", {}
        for accumulate in (1, 2):
            names = [f"{kind}-{accumulate}" for kind in ("plain", "straight", "resumed")]
            self.train(place, names[0], accumulate, own=False)
            straight = self.train(place, names[1], accumulate, own=True)
            resumed = self.train(place, names[2], accumulate, own=True, resume=f"ckpt/{names[1]}/{half}")
            if place.rank == 0:
                saved = [load(Path("ckpt", name, f"step-{self.steps:08d}")) for name in names]
                start = load(Path("ckpt", names[0], half))  # of both runs; the update after it is compared
                reports[accumulate] = {
                    "distance": distance(saved[1]["model"], saved[0]["model"], start["model"]),
                    "different": differences(saved[1], saved[2]),
                    "validations": (straight, resumed),
                }
        return reports


def check_callback(
    make: Callable[[], Callback],
    *,
    ranks: int = 2,
    bound: float | None = None,
    recipe: Callable[[], Any] = SmallRecipe,
    optimizer: Callable[[Any], Optimizer] = sgd,
    batch: int = 12,
    steps: int = 6,
    options: Mapping[str, Any] | None = None,
    timeout_s: float = 120.0,
) -> dict[int, float]:
    """Train short runs with a callback, and check that it keeps the contract. Takes seconds.

    The promises, on one rank and on `ranks`, with one and with two micro-batches per step:

    - A run that resumes from its middle ends with the same bits as an uninterrupted one: weights, optimizer, and the
    callback's states on all ranks.
    - All ranks have the same weights after each step.
    - If `exact` is true, the weights equal those of training without the callback, up to rounding. If it is false, they
    differ by at most `bound`.

    Args:
        make: Returns a new callback; called for each run.
        ranks: Processes, forked from this one. They compute on the CPU.
        bound: Largest distance to training without the callback, relative to the norm of that training's update; None:
            any.
        recipe: Returns the recipe; by default a small network in float64.
        options: More values of `Options`, such as {"clip_norm": 1.0}.

    Returns:
        The distance to training without the callback, by the number of ranks.

    Raises:
        AssertionError: Promises are broken. The message has one line for each.
    """
    runs = Runs(make, recipe, optimizer, batch, steps, options or {})
    name, exact, broken, distances = type(make()).__name__, make().exact, [], {}
    for world in dict.fromkeys((ranks, 1)):
        for accumulate, report in run_ranks(world, runs.on_rank, timeout_s)[0].items():
            where = f"{name} on {world} rank(s), accumulate={accumulate}"
            broken += [f"{where}: {line}" for line in broken_promises(report, exact or idle(make(), world), bound)]
            distances[world] = max(distances.get(world, 0.0), report["distance"])
    assert not broken, "\n".join(broken)
    return distances


def idle(callback: Callback, world: int) -> bool:
    return callback.communicates and world == 1


def broken_promises(report: Mapping[str, Any], exact: bool, bound: float | None) -> list[str]:
    found, away = [], report["distance"]
    if different := report["different"]:
        found.append(
            f"a resumed run has other bits of {', '.join(different[:3])}; return all state that a step reads from "
            "state_dict or rank_state_dict, and take it back"
        )
    straight, resumed = report["validations"]
    if straight != resumed and not different:
        found.append(f"a resumed run validates otherwise: {straight} and {resumed}; save what validation reads")
    if exact and not away <= ROUNDING:
        found.append(f"weights differ by {away:.2g} of the update from training without it; set exact = False")
    if not exact and away <= ROUNDING:
        found.append("weights are those of training without it; set exact = True, or let it change something")
    if not exact and bound is not None and not away <= bound:
        found.append(f"weights differ by {away:.2g} of the update from training without it, more than bound={bound}")
    return found


def load(path: Path) -> dict[str, Any]:
    manifest = verify(path)
    state = load_state(path, manifest["files"])
    parts = {name: read_all(part) for name, part in open_parts(path, manifest["files"], manifest["world"]).items()}
    left_out = ("seconds", "interval", "quarantine")
    return {name: value for name, value in {**state, **parts}.items() if name not in left_out}


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts and lists, by path."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    leaves = {key: leaf for inner, each in items for key, leaf in flatten(each, f"{name}.{inner}".lstrip(".")).items()}
    return leaves if isinstance(value, Mapping | list | tuple) else {name: value}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    first, second = flatten(one), flatten(other)
    names = dict.fromkeys([*first, *second])
    return [name for name in names if bits(first.get(name)) != bits(second.get(name))]


def bits(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return json.dumps(value, default=str)
    return str(value.dtype), tuple(value.shape), value.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """Return the distance between two states of weights, relative to the update from `start` to `other`."""
    names = [name for name, value in other.items() if value.is_floating_point()]

    def length(of: Mapping[str, Tensor], to: Mapping[str, Tensor]) -> float:
        return sum((of[name].double() - to[name].double()).square().sum().item() for name in names) ** 0.5

    return length(one, other) / max(length(other, start), 1e-300)
