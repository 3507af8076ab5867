"""Measures BERT-large on one GPU: Echelon, a bare loop, Hugging Face Trainer and Lightning.

    python scripts/bench/gpu.py [--out FOLDER] [--quick] [--json FILE]

Each cell trains on random tokens in a process of its own. The cells are measured in the order of their importance until
the time is over, and the others are listed. The tables have tokens/s, MFU and peak memory, the host's time for a step,
the delay by a checkpoint, and the device's time by kernel. The other trainers need the extra [peers].

With --out the tables also go to FOLDER/GPU-DATE.md. Without a GPU only --quick runs, a miniature to test the bench.
"""

import multiprocessing
import os
import re
import tempfile
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from scripts.bench.harness import Failed, Report, Rounds, Turn, alone, listed, missing, parser, positive
from scripts.bench.one_gpu.cells import Cell, matrix, miniature
from scripts.bench.one_gpu.measure import attempt
from scripts.bench.one_gpu.table import goals, tables
from scripts.bench.trainers import PACKAGES
from trainer.errors import ConfigError

BUDGET_S = 540  # of all cells: the goal is 9 minutes
CELL_S = 150  # of one cell, of which most is compiling
LEAST_S = 20  # a cell is not begun with less time left
LATE = "not run: the time was over"
EXPECTED = ("not run", "no result", "refused", "out of memory")  # beginnings of reasons that are no fault of the bench
LOADED = ["scripts.bench.one_gpu.measure", "torch._dynamo"]  # not transformers: with torchao it opens the GPU


def main() -> int:
    args = options().parse_args()
    cuda = torch.cuda.is_available()
    if not cuda and not args.quick:
        raise ConfigError("scripts.bench.gpu: there is no GPU here; --quick runs a miniature on the CPU")
    cells = matrix(torch.cuda.get_device_properties(0).total_memory / 2**30 if cuda else 0.0)
    cells = miniature(one_of_each(cells)) if args.quick else cells
    cells = [replace(cell, timed=args.rounds or cell.timed) for cell in cells[: args.cells]]
    found = Rounds.of(cells)
    with Report(args.json, ("torch", "transformers", "accelerate", "lightning", "torchao", "triton")) as report:
        try:
            run_all(found, time.monotonic() + args.budget_s)
        finally:  # also at a signal to stop
            finish(found, report, args.out)
    return int(any(not reason.startswith(EXPECTED) for reason in found.failed.values()))


def options() -> ArgumentParser:
    made = parser("gpu", __doc__, "a miniature of each kind of cell: a minute", "steps that are timed; without it 24")
    made.add_argument("--out", type=folder, metavar="FOLDER", help="write the tables to FOLDER/GPU-DATE.md")
    made.add_argument("--budget-s", type=positive, default=BUDGET_S, help=f"for all cells; without it {BUDGET_S}")
    made.add_argument("--cells", type=positive, help="measure the first so many cells only")
    return made


def folder(word: str) -> Path:
    if not os.access(word, os.W_OK | os.X_OK) or not os.path.isdir(word):
        raise ArgumentTypeError(f"{word}: is no folder that you may write to; make it first")
    return Path(word)


def one_of_each(cells: Iterable[Cell]) -> list[Cell]:
    found: dict[tuple[str, ...], Cell] = {}
    for cell in cells:
        found.setdefault((cell.part, cell.trainer, cell.precision), cell)
    return list(found.values())


def run_all(found: Rounds, ends: float) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(LOADED)
    found.run(1, partial(take_turn, ends))


def take_turn(ends: float, cell: Cell) -> Turn:
    left = ends - time.monotonic()
    if reason := missing(PACKAGES.get(cell.trainer, ())):
        raise Failed(f"not run: {reason}")
    if left < LEAST_S:
        raise Failed(LATE)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return alone(attempt, cell, folder, limit_s=min(CELL_S, left), fork=False)


def finish(found: Rounds, report: Report, out: Path | None) -> None:
    """Fill in the tables, the goals and the cells without numbers, and write the page."""
    measured = {cell: turns[0] for cell, turns in found.turns.items() if turns}
    late = dict.fromkeys((cell for cell, turns in found.turns.items() if not turns), LATE)
    report.tables, report.goals = tables(measured), goals(measured)
    report.notes = [f"- {cell}: {reason.splitlines()[-1]}" for cell, reason in {**found.failed, **late}.items()]
    if out is not None:
        about = report.about
        file = out / f"{re.sub('[^a-z0-9]+', '-', about.get('gpu', 'cpu').lower())}-{about['date']}.md"
        head = f"# BERT-large on one GPU\n\n`python scripts/bench/gpu.py`: {listed(about)}"
        file.write_text(f"{head}\n\n{report.text()}")
        print(f"written: {file}\n")
