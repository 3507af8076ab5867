"""Measures training speed over really slow links: one rank per host, in a cluster in a box. Linux, root, iproute2.

    python scripts/bench_comm.py [--quick] [--hosts 2] [--model 10M] [--rate 1gbit] [--rows overlap,int8] [--json FILE]

All rows take turns, a turn each in every round, in an order that is turned round every round; each is set up anew in
its turn, before the link gets slow, but for `overlap`, which learns from the link. A time is the median over rounds, a
ratio the median of the ratios within each round. Bare DDP is the fastest of its bucket sizes. A word of --rows is a
row, or the beginning of several: `local_sgd`.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from bench_report import Row as Cells
from bench_report import machine, report
from cluster import Cluster, command
from comm_rank import Synthetic
from comm_rows import BASES, QUICK, ROWS, Row
from comm_table import RATES, Config, Result
from comm_turns import Failed, Ranks

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
    """The rows that `words` mean, and those that all are compared with. Tells which of them can't be built."""
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
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="write rows, goals and the machine there")
    made.add_argument("--quick", action="store_true", help="2 hosts, 10M, the slow rates, the main rows, 3 rounds")
    made.add_argument("--hosts", type=int, choices=(2, 4), help="one number of them; without it both")
    made.add_argument("--model", choices=Synthetic.SIZES)
    made.add_argument("--rate", choices=RATES)
    made.add_argument("--rows", help="of the table, separated by commas; what they are compared with is always there")
    made.add_argument("--rounds", type=int, help="whatever --quick says")
    made.add_argument("--seconds", type=float, help="that a turn is timed for, about; 2 steps at least")
    return made.parse_args()


def main() -> int:
    args = options()
    rows = select(args.rows.split(",") if args.rows else QUICK if args.quick else ROWS)
    hosts = [args.hosts] if args.hosts else [2] if args.quick else [2, 4]
    models = [args.model] if args.model else ["10M"] if args.quick else Synthetic.SIZES
    rates = [args.rate] if args.rate else ["100mbit", "1gbit"] if args.quick else RATES
    rounds, seconds = args.rounds or (3 if args.quick else 5), args.seconds or (1.5 if args.quick else 4.0)
    about = machine(("torch", "transformers"))
    print(*(f"{key} {value}" for key, value in about.items()), sep=", ", end="\n\n")
    results: list[Result] = []
    try:
        for n in hosts:
            with tempfile.TemporaryDirectory() as folder, Cluster(n) as cluster:
                ranks = Ranks(cluster, Path(folder))
                for model, rate in itertools.product(models, rates):
                    results.append(Result(Config(n, model, rate), {name: [] for name in rows}, {}))
                    measure(ranks, results[-1], rounds, seconds)
    finally:  # what there is, also when stopped
        whole = [result for result in (each.whole() for each in results) if result]
        tables = [*(result.table() for result in whole), *filter(None, [failures(results)])]
        report(tables, [goal for result in whole for goal in result.goals()], about, args.json)
    return 0


if __name__ == "__main__":
    command(main)
