"""Measures BERT-large on one GPU: Echelon beside a bare loop, Hugging Face Trainer and Lightning.

    python scripts/bench/gpu.py [--out FOLDER] [--quick] [--json FILE]

Each cell trains on random tokens in a process of its own. The cells are measured in the order of their importance until
the time is over, and the others are listed. The tables have tokens/s, MFU and peak memory, the host's time for a step,
the delay by a checkpoint, and the device's time by kernel. The other trainers need the extra [peers].

With --out the tables also go to FOLDER/GPU-DATE.md. Without a GPU only --quick runs, a miniature to test the bench.
"""

import contextlib
import io
import os
import re
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from scripts.bench.bert.cells import Cell, matrix, miniature
from scripts.bench.bert.loops import PACKAGES, missing
from scripts.bench.bert.process import Outcome, run_cell
from scripts.bench.bert.table import goals, tables
from scripts.bench.report import parser, positive, print_machine, report
from trainer.errors import ConfigError

BUDGET_S = 540  # of all cells: the goal is 9 minutes
CELL_S = 150  # of one cell, of which most is compiling
LEAST_S = 20  # a cell is not begun with less time left


def main() -> int:
    args = options().parse_args()
    cuda = torch.cuda.is_available()
    if not cuda and not args.quick:
        raise ConfigError("scripts.bench.gpu: there is no GPU here; --quick runs a miniature on the CPU")
    cells = matrix(torch.cuda.get_device_properties(0).total_memory / 2**30 if cuda else 0.0)
    cells = miniature(one_of_each(cells)) if args.quick else cells
    cells = [replace(cell, timed=args.rounds or cell.timed) for cell in cells[: args.cells]]
    outcomes = {cell: Outcome({}, "not run: the time was over") for cell in cells}
    try:
        run_all(outcomes, time.monotonic() + args.budget_s)
    finally:  # also at a signal to stop
        finish(outcomes, args.json, args.out)
    return int(any(outcome.failed for outcome in outcomes.values()))


def options() -> ArgumentParser:
    made = parser("gpu", __doc__, "a miniature of each kind of cell: a minute", "steps that are timed; without it 24")
    made.add_argument("--out", type=folder, metavar="FOLDER", help="write the tables to FOLDER/GPU-DATE.md")
    made.add_argument("--budget-s", type=positive, default=BUDGET_S, help=f"for all cells; without it {BUDGET_S}")
    made.add_argument("--cells", type=positive, help="measure the first so many cells only")
    return made


def folder(word: str) -> Path:
    """Check before anything is measured that the table can be written."""
    if not os.access(word, os.W_OK | os.X_OK) or not os.path.isdir(word):
        raise ArgumentTypeError(f"{word}: is no folder that you may write to; make it first")
    return Path(word)


def one_of_each(cells: Iterable[Cell]) -> list[Cell]:
    """Return the first cell of each table, trainer and precision."""
    found: dict[tuple[str, ...], Cell] = {}
    for cell in cells:
        found.setdefault((cell.part, cell.trainer, cell.precision), cell)
    return list(found.values())


def run_all(outcomes: dict[Cell, Outcome], ends: float) -> None:
    """Replace the outcome of each cell that there is time for."""
    for cell in outcomes:
        left = ends - time.monotonic()
        if reason := missing(cell):
            outcomes[cell] = Outcome({}, f"not run: {reason}")
        elif left >= LEAST_S:
            outcomes[cell] = run_cell(cell, min(CELL_S, left))
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in outcomes[cell].found.items())
            print(f"{cell.name}: {numbers or outcomes[cell].reason}", file=sys.stderr)


def finish(outcomes: dict[Cell, Outcome], json: Path | None, out: Path | None) -> None:
    """Print the tables, the goals and the cells without numbers, and write them to the files."""
    measured = {cell: outcome.found for cell, outcome in outcomes.items() if outcome.found}
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        about = print_machine(PACKAGES)
        report(tables(measured), goals(measured), about, json)
        for cell, outcome in outcomes.items():
            if outcome.reason:
                print(f"- {cell.name}: {outcome.reason.splitlines()[-1]}")
    print(text.getvalue(), end="")
    if out is not None:
        file = out / f"{re.sub('[^a-z0-9]+', '-', about.get('gpu', 'cpu').lower())}-{about['date']}.md"
        file.write_text(f"# BERT-large on one GPU\n\n`python scripts/bench/gpu.py`: {text.getvalue()}")
        print(f"written: {file}")
