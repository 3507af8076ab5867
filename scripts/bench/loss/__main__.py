"""Measures validation loss against wall time: BERT on text, 4 hosts of one rank, links of 100 Mbit/s.

    python -m scripts.bench.loss [--quick] [--model 10M] [--steps 600] [--json FILE] [--svg FILE] [--real]

The hosts are network namespaces, which need Linux, root and iproute2. A curve over steps does not depend on the link,
so each method trains once, on unlimited links. A few of its steps are timed on slow links, in turns with all other
methods and with steps that communicate nothing. Wall time is steps x seconds a step, without validation and without
waiting for data. --real trains on the slow links and times that training.

All methods have their default knobs, the same learning rate and the same steps; buckets and seeds are those of
scripts.bench.comm. Methods whose names end in `-longer` train for more steps than DDP, to reach its loss.

Each curve is written to the JSON when it is complete. If the JSON has curves of the same settings, only the missing
ones are trained. Steps are timed again in every call. Without options the bench takes hours.
"""

import argparse
import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from scripts.bench.comm.rows import Row
from scripts.bench.comm.table import RATES
from scripts.bench.harness import Failed, Record, Report, Rounds, Turn, installed, new_file, parser, positive
from scripts.bench.hosts import Ranks, ranks_in
from scripts.bench.loss import rank
from scripts.bench.loss.methods import METHODS, SIZES, timed
from scripts.bench.loss.rank import CURVE, Text
from scripts.bench.loss.table import Outcome
from scripts.command import command
from trainer.errors import ConfigError, nearest

HOSTS, RATE = 4, "100mbit"
QUICK = ("ddp", "powersgd", "local_sgd+int8")
TIMED_S = 4.0  # of the steps that a turn times, about


@dataclass(frozen=True)
class Settings:
    model: str
    steps: int
    real: bool

    def title(self, rounds: int) -> str:
        size = SIZES[self.model]
        batch = f"batch {HOSTS} x {size.batch} x {size.sequence} tokens, {self.steps} steps, learning rate {size.lr:g}"
        unlimited = (
            "loss by steps on an unlimited link; wall time = steps x seconds a step, timed on the slow one: median of"
        )
        how = "trained on that link" if self.real else f"{unlimited} {rounds} rounds"
        return f"{self.model}, {HOSTS} hosts, {RATE}; {batch}; {how}"

    def expected_s(self, row: Row) -> float:
        text = Text(SIZES[self.model])
        with torch.device("meta"):
            shapes = [tuple(p.shape) for p in text.model().parameters()]
        sent = row.sends(shapes, HOSTS) if row.sends else 0.0
        return SIZES[self.model].compute_s * max(1.0, HOSTS / (os.cpu_count() or 1)) + sent / RATES[RATE]

    def record(self, file: Any) -> Record:
        return Record(file, asdict(self) | asdict(SIZES[self.model]), curves={})


def train(ranks: Ranks, settings: Settings, name: str, record: Record) -> None:
    method = METHODS[name]
    steps = round(settings.steps * method.longer)
    patience_s = 60 + 20 * steps * settings.expected_s(method.row)
    rate = RATE if settings.real else "unlimited"
    turn = ranks.turn(settings.model, f"train {name}", rate, steps, patience_s, method.row.learns)
    record["curves"][name] = json.loads((ranks.folder / CURVE).read_text())
    record.write()
    loss, sent = record["curves"][name][-1][1], f"{turn['sent'] / 1e6:.3f} MB a step sent, with validations"
    print(f"{name}: loss {loss:.4f}, {turn['seconds'] * steps:.0f} s, {sent}", file=sys.stderr)


def time_step(ranks: Ranks, settings: Settings, name: str) -> Turn:
    row = timed(name)
    expected_s = settings.expected_s(row)
    steps = math.ceil(max(2, min(24, TIMED_S / expected_s)) / row.every) * row.every
    patience_s = 20 * (row.warm + steps) * expected_s
    return ranks.turn(settings.model, f"time {name}", RATE, steps, patience_s, row.learns)


def run(settings: Settings, names: list[str], rounds: int, record: Record) -> Rounds:
    """Train the missing curves and time steps: of each method with a curve, and of "" without communication."""
    failed: dict[str, str] = {}
    with ranks_in(HOSTS, rank.__name__) as ranks:
        for name in names:
            if name not in record["curves"]:
                try:
                    train(ranks, settings, name, record)
                except Failed as error:
                    failed[name] = str(error)
        by_turns = [] if settings.real else [name for name in names if name in record["curves"]]
        turns = Rounds({name: [] for name in ["", *by_turns]}, failed)
        return turns.run(rounds, partial(time_step, ranks, settings))


def options() -> argparse.Namespace:
    quick = "a tiny model, 90 steps, 3 methods, 2 rounds: 4 minutes"
    made = parser("loss", __doc__, quick, "of the turns that time steps; without it 3, or 2 if --quick")
    made.add_argument("--svg", type=new_file, metavar="FILE", help="write the plot to FILE")
    made.add_argument("--real", action="store_true", help="train on the slow links")
    made.add_argument("--model", choices=SIZES, help="parameters; without it 10M, or tiny if --quick")
    made.add_argument("--steps", type=positive, help="of bare DDP; without it 600, or 90 if --quick")
    made.add_argument("--methods", help=f"separated by commas, of {', '.join(METHODS)}; ddp is always measured")
    return made.parse_args()


def main() -> int:
    args = options()
    names = args.methods.split(",") if args.methods else list(QUICK if args.quick else METHODS)
    for name in names:
        if name not in METHODS:
            raise ConfigError(f"--methods {name}: no such method; {nearest(name, list(METHODS))}")
    names = [name for name in METHODS if name in names or name == "ddp"]
    steps = args.steps or (90 if args.quick else 600)
    settings = Settings(args.model or ("tiny" if args.quick else "10M"), steps, args.real)
    rounds = args.rounds or (2 if args.quick else 3)
    if args.svg and not installed("matplotlib"):
        raise ConfigError("--svg: needs matplotlib; pip install 'matplotlib>=3.9,<4', or leave --svg out")
    record = settings.record(args.json)
    with Report(None, ("torch", "transformers")) as report:
        assert Text(SIZES[settings.model]).corpus  # prepared here, once
        turns = run(settings, names, rounds, record)
        curves = {name: record["curves"][name] for name in names if name in record["curves"]}
        comparable = "" in turns.turns and "ddp" in (curves if args.real else turns.turns)
        outcome = Outcome(settings.title(rounds), steps, curves, turns, real=args.real)
        if comparable:
            report.add(outcome.rows(), outcome.goals())
            if args.svg:
                outcome.draw(args.svg)
        failures = [{"part": "Failed", "method": name, "error": error} for name, error in turns.failed.items()]
        report.add(failures)
    if comparable:
        record |= {"machine": report.about, "seconds": {name: turns.values(name) for name in turns.turns}}
        record |= {"rows": report.tables[0], "failures": failures, "goals": [asdict(goal) for goal in report.goals]}
        record.write()
    return 0 if comparable else 1


if __name__ == "__main__":
    command(main)
