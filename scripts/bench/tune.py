"""Measures `trainer.tools.tune` against its grid: every choice that the search may make, each in a trial of its own.

    python -m scripts.bench.tune [--cells 1gbit] [--grid 24] [--quick] [--rounds 5] [--json FILE]

A cell is a link, a number of hosts with a rank each, and a size of BERT on random tokens. Today's config takes 4
micro-batches of 4 samples on a rank. The search's result then meets the best of the grid in rounds of one trial each. A
ratio is the median of the ratios within the rounds. `--grid` also tries a random part of the grid; the time of the
whole grid is then the mean trial's, times its size. `compile`, `pipeline` and `activation_checkpoint` are left out.
Needs Linux, root and iproute2. The whole bench takes more than a day; a cell with `--grid 24` takes 5 to 30 minutes.
"""

import argparse
import gc
import importlib
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from scripts.bench.comm.rank import SIZES, columns
from scripts.bench.harness import Goal, Report, Row, at_least, at_most, matching, median_ratio, parser
from scripts.cluster.netns import Cluster
from scripts.command import command
from trainer.config.compose import compose
from trainer.config.folders import CONF
from trainer.cost.workload import Choice
from trainer.process.environment import detect
from trainer.tools.tune.candidates import NOTHING, describe
from trainer.tools.tune.journal import Journal
from trainer.tools.tune.options import TuneOptions
from trainer.tools.tune.tasks import run_task
from trainer.tools.tune.team import Team, TrialFailed
from trainer.tools.tune.tuning import Tuning

RATES = {"100mbit": "100mbit", "1gbit": "1gbit", "unlimited": None}
SAMPLES, MICRO = 16, 4  # of a rank
WITHOUT = ["compile", "activation_checkpoint", "pipeline"]  # their trials take minutes, or only save memory
STEPS = {"100mbit": 3, "1gbit": 6, "unlimited": 8}  # of a trial, after one that is not timed


class Random(Dataset[dict[str, Tensor]]):
    def __init__(self, rows: int, masked: int) -> None:
        self.rows, self.masked = rows, masked

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(row)
        bounds = columns(self.masked).items()
        return {name: torch.randint(high, (width,), generator=draw) for name, (high, width) in bounds}


class Tokens:
    def __init__(self, size: str = "10M") -> None:
        self.bert = SIZES[size].bert()
        self.weight = self.bert.weight

    def model(self) -> nn.Module:
        return self.bert.model()

    def data(self, split: str) -> Dataset[Any] | None:
        return Random(4096, self.bert.masked) if split == "train" else None

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return self.bert.loss(model, batch)


class Cell(NamedTuple):
    rate: str
    hosts: int
    size: str
    ranks_per_host: int = 1

    def __str__(self) -> str:
        ranks = f" of {self.ranks_per_host} ranks" if self.ranks_per_host > 1 else ""
        return f"{self.rate}, {self.hosts} hosts{ranks}, {self.size}"

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


def make_config(cell: Cell, folder: Path) -> dict[str, Any]:
    (folder / "recipe").mkdir()
    (folder / "recipe" / "tokens.yaml").write_text(
        "# @package _global_\n"
        f"recipe: {{_target_: scripts.bench.tune.Tokens, size: {cell.size}}}\n"
        f"batch: {SAMPLES * cell.ranks}\nmicro_batch: {MICRO}\n"
        f"trainer: {{max_steps: 1000, allow_targets: [scripts], accelerator: cpu}}\n"
    )
    return compose([f"--config-dir={folder}", "recipe=tokens"], [CONF, folder])[0].config


def bench(
    args: argparse.Namespace, name: str, cells: list[Cell], measure: Callable[..., list[Row]],
    goals: Callable[[list[Row]], list[Goal]], **wanted: Any,
) -> int:  # fmt: skip
    """Report the rows of `measure(cell, team, folder, **wanted)`, which the first rank of each cell calls.

    The ranks run the same bench NAME, with `--rank`.
    """
    if args.rank:
        word, file, given = json.loads(args.rank)
        run_rank(lambda team, folder: measure(Cell(*word), team, folder, **given), Path(file))
        return 0
    found, measured = list[Row](), 0
    with Report(args.json) as report:
        try:
            for cell in cells:
                with tempfile.TemporaryDirectory() as folder, Cluster(cell.hosts, RATES[cell.rate]) as cluster:
                    file = Path(folder) / "result.json"
                    order = json.dumps([cell, str(file), wanted])
                    argv = [sys.executable, "-m", f"scripts.bench.{name}", "--rank", order]
                    cluster.run(argv, cell.ranks_per_host, env={"TORCH_CPP_LOG_LEVEL": "ERROR"})
                    found += json.loads(file.read_text()) if file.exists() else []
                    measured += file.exists()
        finally:
            for _, rows in itertools.groupby(found, lambda row: row["part"]):
                report.add(list(rows))
            report.goals = goals(found) if found else []
    return int(measured < len(cells))


def run_rank(measure: Callable[[Team, Path], list[Row]], file: Path) -> None:
    """Be a rank of a cell; the first one calls `measure` and writes its result to `file`."""
    place = detect(os.environ)
    sys.argv = ["tune"]  # Hydra reads it
    importlib.import_module("torch._dynamo")
    gc.freeze()
    with tempfile.TemporaryDirectory() as name:
        team = Team(place, Path(name), run_task)
        try:
            if team.leads:
                file.write_text(json.dumps(measure(team, Path(name))))
            else:
                team.serve()
        finally:
            team.close()


def measure(cell: Cell, team: Team, folder: Path, grid: int | None, rounds: int) -> list[Row]:
    options = TuneOptions(budget_s=3600.0, steps=STEPS[cell.rate], warm=1, without=WITHOUT)
    journal = Journal(folder / "tuned.jsonl", [])
    config = make_config(cell, folder)
    tuning = Tuning(config, options, team, journal, lambda line: say(cell, line))
    choice, verdict, _, _ = tuning.run()
    tune_s = tuning.elapsed_s
    tuned = choice if verdict is not None and verdict.recommended else NOTHING
    for line in verdict.faults if verdict else ():
        say(cell, f"today's config stays: {line}")
    trials = [line["trial"] for line in journal.all("trial")]
    times = [(NOTHING, tuning.today["step_s"])]
    times += [(Choice(**trial["choice"]), trial["step_s"]) for trial in trials if trial["step_s"]]
    listed = list(tuning.search.choices)
    chosen = listed if grid is None else random.Random(0).sample(listed, min(grid, len(listed)))
    model = tuning.search.model
    tried, walls = try_all(cell, tuning, chosen)
    best = min([*times, *tried], key=lambda item: item[1])[0]
    turns = rounds if best != tuned else 1
    pairs = [[tuning.run_trial(each)["step_s"] for each in (best, tuned)] for _ in range(turns)]
    misses = [abs(t["predicted_s"] / t["step_s"] - 1) for t in trials if t["step_s"]]
    misses += [abs(model.predict(each).step_s / step_s - 1) for each, step_s in tried if (each, step_s) not in times]
    return [{
        "part": "The search and the best of its grid", "cell": str(cell), "today s": tuning.today["step_s"],
        "tuned s": median(pair[1] for pair in pairs), "best s": median(pair[0] for pair in pairs),
        "of the best": median_ratio(*zip(*pairs)) if best != tuned else 1.0,
        "tuned": describe(tuned), "best": describe(best), "trials": len(trials), "error": median(misses),
        "tune s": tune_s, "grid": len(listed), "tried": len(chosen), "grid s": mean(walls) * len(listed),
        "of its time": tune_s / mean(walls) / len(listed),
    }]  # fmt: skip


def try_all(cell: Cell, tuning: Tuning, chosen: list[Choice]) -> tuple[list[tuple[Choice, float]], list[float]]:
    found, walls = [], []
    for number, each in enumerate(chosen, 1):
        began = time.monotonic()
        try:
            found.append((each, tuning.run_trial(each)["step_s"]))
            predicted_s = tuning.search.model.predict(each).step_s
            text = f"{predicted_s:.4g} s predicted, {found[-1][1]:.4g} s measured"
        except TrialFailed as error:
            text = f"failed: {error}"
        walls.append(time.monotonic() - began)
        say(cell, f"grid {number}/{len(chosen)} {describe(each)}: {text}")
    return found, walls


def say(cell: Cell, line: str) -> None:
    print(f"{cell}: {line}", file=sys.stderr, flush=True)


def goals(rows: list[Row]) -> list[Goal]:
    least, most = min(row["of the best"] for row in rows), max(row["of its time"] for row in rows)
    return [
        at_least("the best of the grid's time over the tuned config's, worst cell", 0.95, least),
        at_most("time of the search over the grid's, worst cell", 0.1, most),
        at_most("median error of the predictions, over cells", 0.1, median(row["error"] for row in rows)),
    ]


def main() -> int:
    made = parser("tune", __doc__, "the cell of 1 Gbit/s, 2 hosts and 10M, --grid 8: 5 minutes", "without it 5")
    made.add_argument("--cells", default="", metavar="PATTERN", help="a regular expression; without it all 12")
    made.add_argument("--grid", type=int, help="random choices of the grid to try; without it all")
    made.add_argument("--rank", default="", help=argparse.SUPPRESS)
    args = made.parse_args()
    pattern, grid = ("^1gbit, 2 hosts, 10M", args.grid or 8) if args.quick else (args.cells, args.grid)
    cells = matching("--cells", pattern, itertools.starmap(Cell, itertools.product(RATES, (2, 4), SIZES)))
    return bench(args, "tune", cells, measure, goals, grid=grid, rounds=args.rounds or 5)


if __name__ == "__main__":
    command(main)
