"""Measures a pipeline of two stages against data parallelism on a slow link: a rank in each of two network namespaces.

    python -m scripts.bench.stages [--quick] [--rounds 5] [--json FILE]

Both train eight layers of 768 x 768, 4.7 million parameters, on batches of 64 samples. Data parallelism takes a rank's
32 samples at once; `1f1b` takes 8 micro-batches of 8. A ratio is the median of the ratios within each round, and rounds
alternate the order. Needs Linux, root and iproute2. The bench takes about 8 minutes.
"""

import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from scripts.bench.harness import Report, Rounds, Row, parser
from scripts.bench.hosts import Ask, Clock, Order, Timed, fit, place_of, ranks_in, serve
from scripts.command import command
from trainer.callback import Callback
from trainer.callbacks.pipeline import PipelineParallel
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.process.environment import Place
from trainer.trainer import Trainer

HOSTS, WIDTH, LAYERS, BATCH, MICROS = 2, 768, 8, 64, 8
RATES = {"no limit": "unlimited", "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
STEPS = 4  # that are timed


class Chain(nn.Module):
    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Recipe:
    def model(self) -> nn.Module:
        return Chain(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))

    def data(self, split: str) -> TensorDataset | None:
        return TensorDataset(torch.ones(BATCH, WIDTH)) if split == "train" else None

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return model(batch[0]).square().mean()


def train(
    place: Place, clock: Iterable[int], recipe: Any, callbacks: Mapping[str, Callback], batch: int, accumulate: int,
    **options: Any,
) -> None:  # fmt: skip
    folder = Path(place.store).parent
    fit(Trainer(
        recipe, {**callbacks, "timed": Timed(clock)}, batch=batch, accumulate=accumulate, place=place,
        options=Options(
            max_steps=10**6, log_every_steps=10**6, check_replicas_every=10**6, run_dir=str(folder / "run"),
            checkpoint=CheckpointOptions(str(folder / "ckpt"), every_steps=10**6), **options,
        ),
        data=DataOptions(workers=0),
    ))  # fmt: skip


RUNS: dict[str, tuple[Mapping[str, Any], int]] = {"ddp": ({}, 1), "1f1b": ({"cut": [LAYERS // 2]}, MICROS)}


def turn(order: Order, ask: Ask) -> None:
    knobs, accumulate = RUNS[order["row"]]
    callbacks = {"pipeline": PipelineParallel(**knobs)} if knobs else {}
    train(place_of(order), Clock(ask, order["steps"]), Recipe(), callbacks, BATCH, accumulate)


def row(link: str, found: Rounds) -> Row:
    """Return the row of a link: the times of a step, and their ratio, with its least and most."""
    ratios = [a / b for a, b in zip(found.values("1f1b"), found.values("ddp"), strict=True)]
    return {
        "part": f"{HOSTS} ranks, {LAYERS} layers", "link": link, "ddp, ms a step": 1000 * found.median("ddp"),
        "1f1b, ms a step": 1000 * found.median("1f1b"), "1f1b to ddp": found.ratio("1f1b", "ddp"),
        "least": min(ratios), "most": max(ratios),
    }  # fmt: skip


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        serve(turn, "torch._dynamo")
        return 0
    args = parser("stages", __doc__, "one link, 1 round", "without it 5, or 1 if --quick").parse_args()
    rounds, found = args.rounds or (1 if args.quick else 5), dict[str, Rounds]()
    with Report(args.json) as report, ranks_in(HOSTS, "scripts.bench.stages --rank") as ranks:
        for link, rate in RATES.items():
            if link == "100 Mbit/s" or not args.quick:
                turns = partial(ranks.turn, "", rate=rate, steps=STEPS, patience_s=60.0)
                found[link] = Rounds.of(RUNS).run(rounds, turns, f"{link}, ")
        report.add([row(link, each) for link, each in found.items()])
    return 0


if __name__ == "__main__":
    command(main)
