"""Measures what Echelon costs in addition to PyTorch: per step, under DDP, and until the first step.

    python -m scripts.bench.overhead [--quick] [--json FILE]      # pip install -e '.[peers]' adds the other trainers

A time is the median over rounds. The bare loop is there twice. A ratio is the median of the ratios, within each round,
to the mean of the two bare loops. Their own ratios tell the noise: as far as they are from 1.00, others may be off.
The bench runs on the GPU if the machine has one. The two ranks run on two GPUs, or on the CPU. On two CPU cores the
bench takes about 5 minutes.
"""

import itertools

from scripts.bench.harness import Goal, Report, Row, at_most, parser
from scripts.bench.overhead.start_up import imports, start_up
from scripts.bench.overhead.steps import one_process, step_timer, two_ranks
from scripts.bench.trainers import PACKAGES
from scripts.command import command


def goals(loop: list[Row], timer: list[Row], ddp: list[Row], start: list[Row]) -> list[Goal]:
    ratio = {row["loop"]: row["ratio"] for row in loop}
    shown, _, first = start
    *_, timed = timer
    *_, two = ddp
    return [
        at_most("step without callbacks, times the bare loop", 1.02, ratio["Echelon"]),
        at_most("step with the default observers, times the bare loop", 1.08, ratio["Echelon, default observers"]),
        at_most("step_timer, microseconds of a step: 0.5 % of 10 ms", 50, timed["extra CPU us a step"]),
        at_most("transformer step on two ranks, times bare DDP", 1.01, two["ratio"]),
        at_most("--help, seconds", 0.08, shown["seconds"]),
        at_most("first step, times import torch and a bare step", 1.1, first["ratio"]),
    ]


def main() -> None:
    quick = "15, 5 and 5 rounds: under 2 minutes"
    rounds = "of each part; without it 100 in one process, 50 on two ranks, 5 of the first step"
    args = parser("overhead", __doc__, quick, rounds).parse_args()
    with Report(args.json, ("torch", *dict.fromkeys(itertools.chain(*PACKAGES.values())))) as report:
        loop = one_process(args.rounds or (15 if args.quick else 100))
        timer = step_timer(args.rounds or (15 if args.quick else 100))
        ddp = two_ranks(args.rounds or (5 if args.quick else 50))
        start = start_up(args.rounds or 5)
        report.tables, report.goals = [loop, timer, ddp, start, imports()], goals(loop, timer, ddp, start)


if __name__ == "__main__":
    command(main)
