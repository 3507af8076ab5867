"""Measures training speed over slow links: a rank on each host of network namespaces. Needs Linux, root and iproute2.

    python -m scripts.bench.comm [--quick] [--hosts 2] [--model 10M] [--rate 1gbit] [--rows overlap,int8] [--json FILE]

A row is a way to train, and has one turn in every round. The order of rows is reversed after every round. Each turn
sets its row up anew before the link gets slow; rows with `overlap` measure the link, so their set-up is slow too.

A time is the median over rounds; a ratio is the median of the ratios within each round. Bare DDP is the fastest of its
bucket sizes. A word of --rows is a row or the beginning of several, such as `local_sgd`. Without options the bench
takes hours: it measures every row with each number of hosts, model and rate.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from scripts.bench.comm import rank
from scripts.bench.comm.rank import SIZES
from scripts.bench.comm.rows import BASES, QUICK, ROWS, Row
from scripts.bench.comm.table import RATES, Config, Result
from scripts.bench.comm.turns import Failed, Ranks
from scripts.bench.report import Row as Cells
from scripts.bench.report import parser, print_machine, report
from scripts.cluster.netns import Cluster
from scripts.command import command
from trainer.errors import ConfigError, nearest


def measure(ranks: Ranks, result: Result, rounds: int, seconds: float) -> None:
    for n in range(rounds):
        for name in list(result.turns)[:: -1 if n % 2 else 1]:
            take_turn(ranks, result, name, seconds, f"round {n + 1}/{rounds}")


def take_turn(ranks: Ranks, result: Result, name: str, seconds: float, which: str) -> None:
    config, row = result.config, ROWS[name]
    steps = config.steps(row, seconds)
    patience_s = 5 * (row.warm + steps) * config.expected_s(row)
    try:
        turn = ranks.turn(config.model, name, config.rate, steps, patience_s, row.learns)
    except Failed as error:
        result.failed[name] = str(error)
        del result.turns[name]
        print(f"{config}, {which}: {name} failed: {error}", file=sys.stderr)
        return
    result.turns[name].append(turn)
    speed = f"{1 / turn['seconds']:.3f} steps/s, {turn['sent'] / 1e6:.3f} MB sent, {turn['cpu']:.3f} CPU s a step"
    others = f"others used {result.others(turn):.2f} cores"
    print(f"{config}, {which}: {name} {speed} ({steps} steps; {others})", file=sys.stderr)


def select(words: Iterable[str]) -> dict[str, Row]:
    """Return the rows that `words` name and those that all are compared with. Name the rows that can't be built."""
    chosen = {*BASES}
    for word in words:
        found = {name for name in ROWS if name == word or name.startswith(f"{word}-")}
        if not found:
            raise ConfigError(f"--rows {word}: no such row; {nearest(word, list(ROWS))}")
        chosen |= found
    rows = {}
    for name, row in ROWS.items():
        if name in chosen:
            try:
                row.build()
            except ConfigError as error:
                print(f"{name}: not measured, {error}\n")
            else:
                rows[name] = row
    return rows


def failures(results: Iterable[Result]) -> list[Cells]:
    return [
        {"part": "Failed", "table": str(result.config), "row": name, "error": error}
        for result in results
        for name, error in result.failed.items()
    ]


def options() -> argparse.Namespace:
    quick = "2 hosts, 10M, 100mbit and 1gbit, 11 rows, 3 rounds: about 10 minutes"
    made = parser("comm", __doc__, quick, "without it 5, or 3 if --quick")
    made.add_argument("--hosts", type=int, choices=(2, 4), help="without it both")
    made.add_argument("--model", choices=SIZES, help="parameters; without it both")
    made.add_argument("--rate", choices=RATES, help="of each link, each way; without it all")
    made.add_argument("--rows", help="separated by commas; the rows that all are compared with are always measured")
    made.add_argument(
        "--seconds", type=float, help="timed in a turn, about: 2 steps or more; without it 4, or 1.5 if --quick"
    )
    return made.parse_args()


def main() -> int:
    args = options()
    rows = select(args.rows.split(",") if args.rows else QUICK if args.quick else ROWS)
    hosts = [args.hosts] if args.hosts else [2] if args.quick else [2, 4]
    models = [args.model] if args.model else ["10M"] if args.quick else SIZES
    rates = [args.rate] if args.rate else ["100mbit", "1gbit"] if args.quick else RATES
    rounds, seconds = args.rounds or (3 if args.quick else 5), args.seconds or (1.5 if args.quick else 4.0)
    about = print_machine(("torch", "transformers"))
    results: list[Result] = []
    try:
        for n in hosts:
            with tempfile.TemporaryDirectory() as folder, Cluster(n) as cluster:
                ranks = Ranks(cluster, Path(folder), rank.__name__)
                for model, rate in itertools.product(models, rates):
                    results.append(Result(Config(n, model, rate), {name: [] for name in rows}, {}))
                    measure(ranks, results[-1], rounds, seconds)
    finally:  # also of a bench that was stopped
        whole = [result for result in (each.whole() for each in results) if result]
        tables = [*(result.table() for result in whole), *filter(None, [failures(results)])]
        report(tables, [goal for result in whole for goal in result.goals()], about, args.json)
    return 0


if __name__ == "__main__":
    command(main)
