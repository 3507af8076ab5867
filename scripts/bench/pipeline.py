"""Measures pipelines over slow links: `1f1b` and `pipedream_2bw` (2bw), a stage in each host of network namespaces.

    python -m scripts.bench.pipeline [--quick] [--rounds 3] [--json FILE]

Four stages run eight micro-batches. A stage sleeps 40 ms forward and 80 ms backward, so cores that are busy disturb
little. A message has 1 MiB; links let 128 KiB of it through at once, and the rest takes 0, 10, 20 or 40 ms. Waiting is
the time of a step beyond the 960 ms that a stage works. Needs Linux, root and iproute2. It takes about 12 minutes.
"""

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from scripts.bench.harness import Goal, Report, Rounds, Row, at_most, median_ratio, parser
from scripts.bench.hosts import Ask, Clock, Order, Timed, fit, place_of, ranks_in, serve
from scripts.bench.squares import Chain, Squares, quiet
from scripts.command import command
from trainer.callbacks.pipeline import PipelineParallel

STAGES, MICROS = 4, 8
FORWARD_S, BACKWARD_S = 0.040, 0.080
WIDTH = 1 << 18  # 1 MiB
RATES = {"0 ms": "unlimited", "10 ms": "768mbit", "20 ms": "384mbit", "40 ms": "192mbit"}  # a message's time -> a rate
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "2bw": {"schedule": "pipedream_2bw"},
    "2bw, run_ahead=2": {"schedule": "pipedream_2bw", "run_ahead": 2},
}


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


class Recipe(Squares):
    def __init__(self) -> None:
        super().__init__(WIDTH, STAGES, samples=MICROS)

    def model(self) -> nn.Module:
        return Chain(Block() for _ in range(STAGES))


def turn(order: Order, ask: Ask) -> None:
    pipeline = PipelineParallel(STAGES, cut=list(range(1, STAGES)), **SCHEDULES[order["row"]])
    place, callbacks = place_of(order), {"pipeline": pipeline, "timed": Timed(Clock(ask, order["steps"]))}
    fit(quiet(Recipe(), callbacks, place, Path(place.store).parent, MICROS, accumulate=MICROS, clip_norm=1.0))


def row(message: str, found: Rounds) -> tuple[Row, list[Goal]]:
    work, goals = MICROS * (FORWARD_S + BACKWARD_S), list[Goal]()
    waiting = {name: [seconds - work for seconds in found.values(name)] for name in SCHEDULES}
    made: Row = {"part": f"{STAGES} stages, {MICROS} micro-batches", "a message takes": message}
    made |= {f"{name}, ms a step": 1000 * found.median(name) for name in SCHEDULES}
    base, *others = SCHEDULES
    for name in others:
        made[f"{name}, time"] = found.ratio(name, base)
        made[f"{name}, waiting"] = median_ratio(waiting[name], waiting[base])
        goals.append(at_most(f"waiting of {name}, {message}", 0.43, made[f"{name}, waiting"]))
    return made, goals


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        serve(turn, "torch._dynamo")
        return 0
    args = parser("pipeline", __doc__, "one rate, 5 steps, 1 round", "without it 3, or 1 if --quick").parse_args()
    rounds, steps = args.rounds or (1 if args.quick else 3), 5 if args.quick else 8
    found = {message: Rounds.of(SCHEDULES) for message in (["10 ms"] if args.quick else RATES)}
    with Report(args.json) as report, ranks_in(STAGES, "scripts.bench.pipeline --rank") as ranks:
        for message, each in found.items():
            each.run(rounds, partial(ranks.turn, "", rate=RATES[message], steps=steps, patience_s=60.0), f"{message}, ")
        rows = [row(message, each) for message, each in found.items()]
        report.add([made for made, _ in rows], [goal for _, goals in rows for goal in goals])
    return 0


if __name__ == "__main__":
    command(main)
