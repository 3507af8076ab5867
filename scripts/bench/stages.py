"""Measures a pipeline of two stages against data parallelism on a slow link: a rank in each of two network namespaces.

    python -m scripts.bench.stages [--quick] [--rounds 5] [--json FILE]

Both train eight layers of 768 x 768, 4.7 million parameters, on batches of 64 samples. Data parallelism takes a rank's
32 samples at once; `1f1b` takes 8 micro-batches of 8. A ratio is the median of the ratios within each round, and rounds
alternate the order. Needs Linux, root and iproute2. The bench takes about 8 minutes.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bench.harness import Report, Rounds, Row, parser
from scripts.bench.hosts import Ask, Clock, Order, Timed, fit, place_of, ranks_in, serve
from scripts.bench.squares import Squares, quiet
from scripts.command import command
from trainer.callback import Callback
from trainer.callbacks.pipeline import PipelineParallel

HOSTS, WIDTH, LAYERS, BATCH, MICROS = 2, 768, 8, 64, 8
RATES = {"no limit": "unlimited", "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
STEPS = 4  # that are timed


RUNS: dict[str, tuple[Mapping[str, Any], int]] = {"ddp": ({}, 1), "1f1b": ({"cut": [LAYERS // 2]}, MICROS)}


def turn(order: Order, ask: Ask) -> None:
    knobs, accumulate = RUNS[order["row"]]
    callbacks: dict[str, Callback] = {"pipeline": PipelineParallel(**knobs)} if knobs else {}
    callbacks["timed"] = Timed(Clock(ask, order["steps"]))
    place, recipe = place_of(order), Squares(WIDTH, LAYERS)
    fit(quiet(recipe, callbacks, place, Path(place.store).parent, BATCH, accumulate=accumulate))


def row(link: str, found: Rounds) -> Row:
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
