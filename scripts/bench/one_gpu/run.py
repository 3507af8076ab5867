"""Tests and measures Echelon on one GPU, within eight minutes, in order of worth.

    python scripts/bench/gpu.py --out FOLDER

The parts in order: the tests that failed on 2026-11-26, eager steps compared with a bare loop, and BERT-large with
Echelon, Hugging Face Trainer, Lightning and a bare loop. Then come kernels, the ladder to an MFU of 0.55, a checkpoint
during training, and images to the GPU. Other settings are measured as far as there is time. A part ends at its own
limit. Each cell of a part is a process of its own. One that fails, is refused or takes too long is listed with the
reason.

FOLDER/NAME.jsonl gets a line for each cell as soon as it is measured, and FOLDER/NAME.md then has the tables so far.
NAME is the GPU's, with the date and the time. A kill therefore costs only the cell that it interrupts.

With ECHELON_TEST_DEVICE=cpu, every cell runs in miniature on the CPU, to test the command.
"""

import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from scripts.bench.harness import Failed, Report, Row, Turn, alone, listed, missing, positive
from scripts.bench.one_gpu.cells import Cell, Part, Rung, ladder, micro_batch, miniature, miniatures, parts
from scripts.bench.one_gpu.measure import attempt
from scripts.bench.one_gpu.table import goals, tables
from scripts.bench.trainers import PACKAGES
from trainer.errors import ConfigError
from trainer.files import write_whole

CELL_S = 100  # of one cell, of which most is compiling
LEAST_S = 15  # a cell is not begun with less time left
LATE = "not run: the time was over"
EXPECTED = ("not run", "no result", "refused", "out of memory")  # beginnings of reasons that are no fault of the run
VERSIONS = ("torch", "transformers", "accelerate", "lightning", "torchao", "triton")
LOADED = ["scripts.bench.one_gpu.measure", "torch._dynamo"]
TRANSFORMERS = "transformers.models.bert.modeling_bert"  # with torchao its import opens the GPU


def main() -> int:
    args = options().parse_args()
    cpu = os.environ.get("ECHELON_TEST_DEVICE") == "cpu"
    if not cpu and not torch.cuda.is_available():
        raise ConfigError("scripts/bench/gpu.py: there is no GPU here; ECHELON_TEST_DEVICE=cpu runs miniatures")
    memory = 0.0 if cpu else torch.cuda.get_device_properties(0).total_memory / 2**30
    whole, rungs = parts(memory), ladder(micro_batch(memory))
    if cpu:
        whole = miniatures(whole)
        rungs = [Rung(name, miniature(cell), on and miniature(on)) for name, cell, on in rungs]
    slower = args.budget_s / sum(part.limit_s for part in whole)
    multiprocessing.get_context("forkserver").set_forkserver_preload([*LOADED, *([TRANSFORMERS] if cpu else [])])
    with Report(None, VERSIONS) as report:
        results = Results(args.out, report, rungs)
        run_all([part._replace(limit_s=part.limit_s * slower) for part in whole], results)
    return int(any(not reason.startswith(EXPECTED) for reason in results.failed.values()))


def options() -> ArgumentParser:
    limit = round(sum(part.limit_s for part in parts(0.0)))
    made = ArgumentParser("scripts/bench/gpu.py", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    made.add_argument("--out", type=folder, metavar="FOLDER", required=True, help="of the results")
    made.add_argument("--budget-s", type=positive, default=limit, help=f"of all parts; without it {limit}")
    return made


def folder(word: str) -> Path:
    if not os.access(word, os.W_OK | os.X_OK) or not os.path.isdir(word):
        raise ArgumentTypeError(f"{word}: is no folder that you may write to; make it first")
    return Path(word)


@dataclass
class Results:
    """The numbers and the failures of cells so far, in two files that are whole after each cell."""

    out: Path
    report: Report
    rungs: Sequence[Rung] = ()
    measured: dict[Cell, Turn] = field(default_factory=dict)
    failed: dict[Cell, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # of each part

    def __post_init__(self) -> None:
        gpu = re.sub("[^a-z0-9]+", "-", str(self.report.about.get("gpu", "cpu")).lower())
        self.file = self.out / f"{gpu}-{time.strftime('%Y-%m-%d-%H%M')}"

    def add(self, part: str, cell: Cell, numbers: Turn | None, reason: str, seconds: float) -> None:
        if numbers is None:
            self.failed[cell] = reason
        else:
            self.measured[cell] = numbers
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        row: Row = {"part": part, "cell": str(cell), "seconds": round(seconds, 1), "numbers": numbers, "reason": reason}
        with self.file.with_suffix(".jsonl").open("a") as file:
            file.write(f"{json.dumps(row)}\n")
        said = reason or ", ".join(f"{key} {value:.4g}" for key, value in (numbers or {}).items())
        print(f"{part}: {cell}: {said}", file=sys.stderr, flush=True)
        self.write_page()

    def write_page(self) -> None:
        self.report.tables = [*tables(self.measured, self.rungs), self._times()]
        self.report.goals = goals(self.measured)
        self.report.notes = [f"- {cell}: {reason.splitlines()[-1]}" for cell, reason in self.failed.items()]
        head = f"# Measured on one GPU\n\n`python scripts/bench/gpu.py`: {listed(self.report.about)}"
        write_whole(self.file.with_suffix(".md"), f"{head}\n\n{self.report.text()}".encode())

    def _times(self) -> list[Row]:
        return [{"part": "seconds that the parts took", "of": name, "s": took} for name, took in self.seconds.items()]


def run_all(whole: Sequence[Part], results: Results) -> None:
    """Measure the parts in order. Cells for which a part had no time come before those of the last part."""
    ends, late = time.monotonic(), dict[Cell, str]()
    *first, last = whole
    for part in [*first, last]:
        ends += part.limit_s
        cells = dict.fromkeys(part.cells, part.name)
        for cell, name in ({**late, **cells} if part is last else cells).items():
            if cell in results.measured or cell in results.failed:
                continue  # a rung of the ladder may be a cell of an earlier part
            if ends - time.monotonic() >= LEAST_S:
                take_turn(name, cell, ends, results)
            elif part is last:
                results.add(name, cell, None, LATE, 0.0)
            else:
                late[cell] = name


def take_turn(part: str, cell: Cell, ends: float, results: Results) -> None:
    began = time.monotonic()
    numbers, reason = None, missing(PACKAGES.get(cell.trainer, ()))
    if reason:
        reason = f"not run: {reason}"
    else:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            try:
                numbers = alone(attempt, cell, name, limit_s=min(CELL_S, ends - began), fork=False)
            except Failed as error:
                reason = str(error)
    results.add(part, cell, numbers, reason, time.monotonic() - began)
