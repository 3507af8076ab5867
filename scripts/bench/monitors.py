"""Measures what monitors take of a step: the CPU time of a run with a monitor, minus that of the same run without it.

    python -m scripts.bench.monitors --out docs/measurements/monitors.md     # on an otherwise idle machine
    python -m scripts.bench.monitors [--quick] [--rounds 9] [--json FILE] [--out FILE]

In each round, each monitor has a pair of runs, one after the other, in the same processes; the next round turns the
pairs around. CPU time is that of all threads of a rank, the mean over ranks. The pair `nothing` is two runs without a
monitor: as far as it is from 0, others may be off. A run's number is the median over its blocks of 50 steps, so that
a neighbour's burst on the machine does not count. The bench runs on GPUs if each rank has one. On two CPU cores it
takes about half an hour.
"""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from scripts.bench.harness import (
    Goal,
    Report,
    Rounds,
    Row,
    Turn,
    at_most,
    on_ranks,
    parser,
)  # fmt: skip
from scripts.bench.overhead.steps import device
from scripts.bench.overhead.turns import MLP, Task
from scripts.bench.trainers import Batch, echelon
from scripts.command import command
from trainer.callback import Callback
from trainer.comm.reduce import Reduce
from trainer.loggers.events import Events
from trainer.monitors.comm_monitor import CommMonitor
from trainer.monitors.gpu_monitor.callback import GpuMonitor
from trainer.monitors.profiler.callback import Profiler
from trainer.monitors.step_timer import StepTimer
from trainer.process.environment import Place

WARM, STEPS = 100, {1: 8000, 2: 2000}  # steps that are not timed, and by the number of ranks those that are
BLOCK = 50  # steps, of which one is logged
FAST_S = 0.1  # between two samples of gpu_monitor, ten times as often as by default: a run takes about a second
BOUND_US = 50.0  # 0.5 % of a step of 10 ms
RUNS = itertools.count()  # of this process

Callbacks = Callable[[], dict[str, Callback]]


class Chain(Callback):
    """Puts the Reduce chain in the place of DDP's own reducer, as comm_monitor does."""

    def wrap_reduce(self, trainer, reduce: Reduce) -> Reduce:
        return reduce


# Name -> the callbacks of the two runs of a pair, and what the number says.
PAIRS: dict[str, tuple[Callbacks, Callbacks, str]] = {
    "nothing": (dict, dict, "the noise"),
    "step_timer": (dict, lambda: {"step_timer": StepTimer()}, "the clock of the phases"),
    "events": (dict, lambda: {"events": Events()}, "no validation or checkpoint among the steps"),
    "profiler": (dict, lambda: {"profiler": Profiler(first=1_000_000)}, "outside of its recordings"),
    "gpu_monitor": (dict, lambda: {"gpu_monitor": GpuMonitor(FAST_S)}, "10 samples a second; by default 1"),
    "comm_monitor": (dict, lambda: {"comm_monitor": CommMonitor()}, "with the Reduce chain instead of DDP's C++"),
    "comm_monitor, on the chain": (
        lambda: {"chain": Chain()},
        lambda: {"chain": Chain(), "comm_monitor": CommMonitor()},
        "another callback has the Reduce chain already",
    ),
}


class Batches:
    """Endless batches. The CPU time is taken as the first batch of each block is asked for."""

    def __init__(self, task: Task, steps: int) -> None:
        self.pool, self.steps = [task.batch() for _ in range(64)], steps
        self.taken = list[float]()

    def __iter__(self) -> Iterator[Batch]:
        for n in range(WARM + self.steps + 8):
            if n >= WARM and (n - WARM) % BLOCK == 0:
                self.taken.append(time.process_time())
            yield self.pool[n % len(self.pool)]


def run(place: Place, task: Task, callbacks: dict[str, Callback]) -> float:
    """Train, and return this rank's CPU microseconds of a step, the median over blocks."""
    steps, number = STEPS[place.world], next(RUNS)
    torch.manual_seed(0)
    batches = Batches(task, steps)
    gc.collect()
    own = replace(place, store=f"{place.store}-{number}") if place.world > 1 else place
    echelon(task.job(batches, WARM + steps + 2, Path(f"{number}").absolute()), callbacks, own)
    return statistics.median(end - begin for begin, end in itertools.pairwise(batches.taken)) / BLOCK * 1e6


def rank_of(place: Place, rounds: int) -> Rounds:
    """Run all pairs as one of the ranks. With one rank, comm_monitor is left out of a run."""
    task, seen = replace(MLP, device=device(place.rank, place.world)), itertools.count()

    def pair(name: str) -> Turn:
        backwards = next(seen) // len(found.turns) % 2
        made = {"without": PAIRS[name][0], "with": PAIRS[name][1]}
        return {kind: run(place, task, made[kind]()) for kind in list(made)[:: -1 if backwards else 1]}

    found = Rounds.of(name for name in PAIRS if place.world > 1 or not name.startswith("comm_monitor"))
    return found.run(rounds, pair)


def measure(world: int, rounds: int) -> list[Row]:
    ranks: list[Rounds] = on_ranks(world, rank_of, rounds)
    part = f"{world} rank(s); {rounds} rounds of {STEPS[world]:,} steps, of which each 50th is logged"

    def us(name: str, key: str) -> list[float]:
        return [statistics.mean(each) for each in zip(*(rank.values(name, key) for rank in ranks), strict=True)]

    def extra(name: str) -> list[float]:
        return [with_it - without for without, with_it in zip(us(name, "without"), us(name, "with"), strict=True)]

    return ranks[0].table(part, "monitor", {
        "CPU us a step without": lambda name: statistics.median(us(name, "without")),
        "extra CPU us": lambda name: statistics.median(extra(name)),
        "least": lambda name: min(extra(name)), "most": lambda name: max(extra(name)),
        "what": lambda name: PAIRS[name][2],
    })  # fmt: skip


def goals(tables: list[list[Row]]) -> list[Goal]:
    return [
        at_most(f"{row['monitor']}, {row['part'].split(';')[0]}, CPU us of a step", BOUND_US, row["extra CPU us"])
        for table in tables
        for row in table
        if row["monitor"] != "nothing"
    ]


def main() -> None:
    rounds, out = "pairs of each monitor, at least 5; without it 9", "write the tables to a page of Markdown"
    args = parser("monitors", __doc__, "5 rounds", rounds, out).parse_args()
    with Report(args.json, out=args.out) as report:
        for world in STEPS:
            report.add(measure(world, max(5, args.rounds or (5 if args.quick else 9))))
        report.goals = goals(report.tables)


if __name__ == "__main__":
    command(main)
