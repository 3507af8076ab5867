"""Measures pipelines over slow links: `1f1b` beside `pipedream_2bw` (2bw), a stage in each host of network namespaces.

    python -m scripts.bench.pipeline [--quick] [--rounds 3] [--json FILE]

Four stages run eight micro-batches. A stage sleeps 40 ms forward and 80 ms backward, so cores that are busy disturb
little. A message has 1 MiB; links let 128 KiB of it through at once, and the rest takes 0, 10, 20 or 40 ms. Waiting is
the time of a step beyond the 960 ms that a stage works. Needs Linux, root and iproute2. It takes about 12 minutes.
"""

import sys
import time
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.data import TensorDataset

from scripts.bench.report import Goal, Row, at_most, parser, print_machine, report
from scripts.bench.stages import Chain, measure, rank, time_steps
from scripts.cluster.netns import Cluster
from scripts.command import command
from trainer.callbacks.pipeline import PipelineParallel
from trainer.process.environment import Place

STAGES, MICROS = 4, 8
FORWARD_S, BACKWARD_S = 0.040, 0.080
WIDTH = 1 << 18  # 1 MiB
RATES = {"0 ms": None, "10 ms": "768mbit", "20 ms": "384mbit", "40 ms": "192mbit"}  # a message's time -> a link's rate
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "2bw": {"schedule": "pipedream_2bw"},
    "2bw, run_ahead=2": {"schedule": "pipedream_2bw", "run_ahead": 2},
}
SETTLED = 3  # steps before those that are timed


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        time.sleep(FORWARD_S)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        time.sleep(BACKWARD_S)
        return grad


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Any = Sleep.apply(x + self.shift)
        return y


class Recipe:
    def model(self) -> nn.Module:
        return Chain(Block() for _ in range(STAGES))

    def data(self, split: str) -> TensorDataset | None:
        return TensorDataset(torch.ones(MICROS, WIDTH)) if split == "train" else None

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return model(batch[0]).mean()


def train(place: Place, knobs: dict[str, Any], steps: int) -> float:
    """Return the seconds of a step."""
    pipeline = PipelineParallel(STAGES, cut=list(range(1, STAGES)), **knobs)
    return time_steps(Recipe(), {"pipeline": pipeline}, place, MICROS, MICROS, SETTLED, steps, clip_norm=1.0)


def table(times: dict[str, list[dict[str, float]]]) -> tuple[list[Row], list[Goal]]:
    rows: list[Row] = []
    work = MICROS * (FORWARD_S + BACKWARD_S)
    base, *others = SCHEDULES
    for message, rounds in times.items():
        row: Row = {"part": f"{STAGES} stages, {MICROS} micro-batches", "a message takes": message}
        for name in SCHEDULES:
            row[f"{name}, ms a step"] = 1000 * median(each[name] for each in rounds)
        for name in others:
            row[f"{name}, time"] = median(each[name] / each[base] for each in rounds)
            row[f"{name}, waiting"] = median((each[name] - work) / (each[base] - work) for each in rounds)
        rows.append(row)
    goals = [
        at_most(f"waiting of {name}, {row['a message takes']}", 0.43, row[f"{name}, waiting"])
        for row in rows
        for name in others
    ]
    return rows, goals


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        steps = int(sys.argv[3])
        rank(sys.argv[2], STAGES, {name: partial(train, knobs=knobs, steps=steps) for name, knobs in SCHEDULES.items()})
        return 0
    args = parser("pipeline", __doc__, "one rate, 5 steps, 1 round", "without it 3, or 1 if --quick").parse_args()
    about = print_machine(("torch",))
    rates = {"10 ms": RATES["10 ms"]} if args.quick else RATES
    rounds, steps = args.rounds or (1 if args.quick else 3), 5 if args.quick else 8
    times: dict[str, list[dict[str, float]]] = {message: [] for message in rates}
    with Cluster(STAGES) as cluster:
        for n in range(rounds):
            for message, rate in rates.items():
                times[message].append(measure(cluster, rate, "scripts.bench.pipeline", [str(steps)]))
                print(f"round {n + 1}/{rounds}, {message}: {times[message][-1]}", file=sys.stderr)
    rows, goals = table(times)
    report([rows], goals, about, args.json)
    return 0


if __name__ == "__main__":
    command(main)
