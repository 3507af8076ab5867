"""Measures what monitors take of a step: the CPU time of a run with a monitor, minus that of the same run without it.

    python -m scripts.bench.monitors --out docs/measurements/monitors.md     # on an otherwise idle machine
    python -m scripts.bench.monitors [--quick] [--rounds 9] [--json FILE] [--out FILE]

In each round, each monitor has a pair of runs, one after the other, in the same processes; the next round turns the
pairs around. CPU time is that of all threads of a rank, the mean over ranks. The pair `nothing` is two runs without a
monitor: as far as it is from 0, others may be off. A run's number is the median over its blocks of 50 steps, so that
a neighbour's burst on the machine does not count. The bench runs on GPUs if each rank has one. On two CPU cores it
takes about half an hour.
"""

import functools
import gc
import itertools
import multiprocessing
import os
import statistics
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from scripts.bench.overhead.loops import MLP, Task, echelon
from scripts.bench.overhead.steps import device
from scripts.bench.overhead.turns import silence
from scripts.bench.report import (
    Goal,
    Row,
    at_most,
    machine_line,
    markdown,
    new_file,
    paragraphs,
    parser,
    print_machine,
    report,
)
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
    "comm_monitor, beside the chain": (
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

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for n in range(WARM + self.steps + 8):
            if n >= WARM and (n - WARM) % BLOCK == 0:
                self.taken.append(time.process_time())
            yield self.pool[n % len(self.pool)]


def run(place: Place, task: Task, callbacks: dict[str, Callback], folder: Path) -> float:
    """Train, and return this rank's CPU microseconds of a step, the median over blocks."""
    steps = STEPS[place.world]
    torch.manual_seed(0)
    batches = Batches(task, steps)
    gc.collect()
    echelon(task, batches, WARM + steps + 2, folder, callbacks, place)
    return statistics.median(end - begin for begin, end in itertools.pairwise(batches.taken)) / BLOCK * 1e6


def rank_of(rank: int, world: int, folder: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Run all pairs as one of the ranks. Return the microseconds of both runs, by pair and round."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    task, found = replace(MLP, device=device(rank, world)), {name: list[tuple[float, float]]() for name in pairs(world)}
    with silence():
        for n in range(rounds):
            for name in found:
                us, made = dict[int, float](), PAIRS[name][:2]
                for which in (1, 0) if n % 2 else (0, 1):
                    own = Path(folder, f"{n}-{name}-{which}")
                    store = f"{folder}/store-{n}-{name.replace(' ', '')}-{which}"
                    place = Place(rank, world, rank, world, store, "benchmark") if world > 1 else Place()
                    us[which] = run(place, task, made[which](), own)
                found[name].append((us[0], us[1]))
    return found


def pairs(world: int) -> list[str]:
    """Return the names of the pairs. With one rank, comm_monitor is left out of a run."""
    return [name for name in PAIRS if world > 1 or not name.startswith("comm_monitor")]


def measure(world: int, rounds: int) -> list[Row]:
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(world, multiprocessing.get_context("spawn")) as pool,
    ):
        ask = functools.partial(rank_of, world=world, folder=folder, rounds=rounds)
        try:
            ranks = list(pool.map(ask, range(world)))
        except BaseException:  # also a signal; without its peers a rank would wait for a time-out
            for process in multiprocessing.active_children():
                process.kill()
            raise
    part = f"{world} rank(s); {rounds} rounds of {STEPS[world]:,} steps, of which each 50th is logged"
    return [
        row(part, name, [mean_of(each) for each in zip(*(rank[name] for rank in ranks), strict=True)])
        for name in pairs(world)
    ]


def mean_of(ranks: tuple[tuple[float, float], ...]) -> tuple[float, float]:
    without, with_it = (statistics.mean(us) for us in zip(*ranks, strict=True))
    return without, with_it


def row(part: str, name: str, rounds: list[tuple[float, float]]) -> Row:
    extra = sorted(with_it - without for without, with_it in rounds)
    return {
        "part": part,
        "monitor": name,
        "CPU us a step without": statistics.median(without for without, _ in rounds),
        "extra CPU us": statistics.median(extra),
        "least": extra[0],
        "most": extra[-1],
        "what": PAIRS[name][2],
    }


def goals(tables: list[list[Row]]) -> list[Goal]:
    """Return the goals of all monitors: 0.5 % of a step of 10 ms."""
    return [
        at_most(f"{row['monitor']}, {row['part'].split(';')[0]}, CPU us of a step", BOUND_US, row["extra CPU us"])
        for table in tables
        for row in table
        if row["monitor"] != "nothing"
    ]


def page(tables: list[list[Row]], found: list[Goal], about: Row) -> str:
    """Return the page of docs/measurements."""
    missed = "; ".join(goal.name for goal in found if not goal.met)
    verdict = f"Missed: {missed}." if missed else "All are met."
    return paragraphs(
        "# What monitors take of a step",
        "`python -m scripts.bench.monitors` trains an MLP 64-64-10, batch 32 a rank, SGD, one thread.\n"
        "Runs are in pairs, one after the other: with a monitor and without it. The numbers are CPU microseconds\n"
        "of a step, of all threads of a rank: the median over blocks of 50 steps, and the mean over ranks.\n"
        "Extra is the median over rounds of the difference in a pair, least and most are its extremes.",
        machine_line(about),
        *(markdown(table) for table in tables),
        textwrap.fill(f"The goal of each is 50 us: 0.5 % of a step of 10 ms. {verdict}", 118),
    )


def main() -> None:
    options = parser("monitors", __doc__, "5 rounds", "pairs of each monitor, at least 5; without it 9")
    options.add_argument("--out", type=new_file, metavar="FILE", help="write the tables as a page of Markdown")
    args = options.parse_args()
    rounds = max(5, args.rounds or (5 if args.quick else 9))
    about = print_machine(("torch",))
    tables = [measure(world, rounds) for world in STEPS]
    found = goals(tables)
    report(tables, found, about, args.json)
    if args.out:
        args.out.write_text(page(tables, found, about))


if __name__ == "__main__":
    command(main)
