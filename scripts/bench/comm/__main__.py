"""Measures training speed over slow links: a rank on each host of network namespaces. Needs Linux, root and iproute2.

    python -m scripts.bench.comm [--quick] [--hosts 2] [--model 10M] [--rate 1gbit] [--rows overlap,int8] [--json FILE]

A row is a way to train, and has one turn in every round. The order of rows is reversed after every round. Each turn
sets its row up again before the link gets slow; rows with `overlap` measure the link, so their set-up is slow too.

A time is the median over rounds; a ratio is the median of the ratios within each round. Bare DDP is the fastest of its
bucket sizes. A word of --rows is a row or the beginning of several, such as `local_sgd`. Without options the bench
takes hours: it measures every row with each number of hosts, model and rate.
"""

import argparse
import itertools
from collections.abc import Iterable
from functools import partial

from scripts.bench.comm import rank
from scripts.bench.comm.rank import SIZES
from scripts.bench.comm.rows import BASES, QUICK, ROWS
from scripts.bench.comm.table import RATES, Config, Result
from scripts.bench.harness import Report, Turn, parser
from scripts.bench.hosts import Ranks, ranks_in
from scripts.command import command
from trainer.errors import ConfigError, nearest


def take_turn(ranks: Ranks, config: Config, seconds: float, name: str) -> Turn:
    row = ROWS[name]
    steps = config.steps(row, seconds)
    patience_s = 5 * (row.warm + steps) * config.expected_s(row)
    return ranks.turn(config.model, name, config.rate, steps, patience_s, row.learns)


def select(words: Iterable[str]) -> list[str]:
    """Return the rows that `words` name and those that all are compared with."""
    chosen = {*BASES}
    for word in words:
        found = {name for name in ROWS if name == word or name.startswith(f"{word}-")}
        if not found:
            raise ConfigError(f"--rows {word}: no such row; {nearest(word, list(ROWS))}")
        chosen |= found
    return [name for name in ROWS if name in chosen]


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
    results: list[Result] = []
    with Report(args.json, ("torch", "transformers")) as report:
        try:
            for n in hosts:
                with ranks_in(n, rank.__name__) as ranks:
                    for model, rate in itertools.product(models, rates):
                        config = Config(n, model, rate)
                        results.append(Result(config, {name: [] for name in rows}, {}))
                        results[-1].run(rounds, partial(take_turn, ranks, config, seconds), f"{config}, ")
        finally:
            for whole in filter(None, (result.whole() for result in results)):
                report.add(whole.rows(), whole.goals())
            report.add([
                {"part": "Failed", "table": str(result.config), "row": name, "error": error}
                for result in results
                for name, error in result.failed.items()
            ])  # fmt: skip
    return 0


if __name__ == "__main__":
    command(main)
