"""echelon compare RUN...: shows how runs differ: a row for each run, with the keys that differ and its metrics."""

import itertools
import json
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.annotated import as_yaml
from trainer.errors import ConfigError, nearest, printable
from trainer.files import finite
from trainer.process.arguments import ArgumentParser
from trainer.process.exit import run_guarded
from trainer.process.stdio import tolerate_closed_pipes
from trainer.tools.report.page import duration
from trainer.tools.report.payload import CLOCKS
from trainer.tools.report.run import Run, best_of, differences, direction, names_of, of_job, read_run, usually
from trainer.tools.report.tables import value_of

SHOWN = ("train/loss", "perf/samples_per_s")  # in addition to validations, without --all
UNWRITTEN = (": is missing", ": has no line yet")  # notes that a run's error explains
WIDEST = 40  # columns of a value; the rest is folded
GAP = 2  # columns between two values
LONG = 16  # characters of a run's name that is not shortened in a table
DATE = re.compile(r"-\d{8}-\d{6}(-\d+)?$")  # of a run's folder


class Column(NamedTuple):
    head: str
    cells: list[str]  # of each run

    @property
    def width(self) -> int:
        return min(WIDEST, max(cell_len(text) for text in (self.head, *self.cells)))


def compare(folders: list[Path], as_json: bool, everything: bool, by: str | None = None) -> int:
    runs = [read_run(folder, name, 1, 1) for folder, name in zip(folders, names_of(folders), strict=True)]
    if by:
        sort_by(runs, by)
        runs = ordered(runs, watched(runs))
    if as_json:
        print(json.dumps(finite(as_object(runs)), indent=1, default=str))
    else:
        show(runs, everything)
    return 0


def compare_jobs(jobs: Sequence[tuple[Path, Mapping[str, Any], int, bool]]) -> int:
    """Show the jobs of a sweep, also those that made no run: folder, config, exit code, and whether it wrote files."""
    names = names_of([job[0] for job in jobs])
    show([of_job(name, *job) for name, job in zip(names, jobs, strict=True)], False)
    return 0


def show(runs: list[Run], everything: bool) -> None:
    """Print the runs, the best first. A single run is shown as a list of its values."""
    console = Console(highlight=False, markup=False)
    metric = watched(runs)
    runs = ordered(runs, metric)
    names, found = Column("run", numbered([run.name for run in runs])), columns(runs, metric, everything)
    if len(runs) == 1:
        tables = [[Column("run", [c.head for c in found]), Column(runs[0].name, [c.cells[0] for c in found])]]
    else:
        tables = [[names, *block] for block in blocks(found, names, console.width)]
    for table in tables:
        console.print(made(table))
        console.print()
    for run in runs:
        for note in (run.ending, *run.notes):
            if note and not (run.error and note.endswith(UNWRITTEN)):
                console.print(Text(printable(f"{run.name}: {note}")), soft_wrap=True)
    if len(runs) > 1 and (best := best_of(runs[0], metric) if metric in runs[0].metrics else None):
        print(printable(f"best: {runs[0].name}, {metric} {value_of(best[0], metric)} at step {best[1]:,}"))
    if having := [run for run in runs if run.metrics]:
        print(printable(f"curves: {shlex.join(['echelon', 'report', *(str(run.folder) for run in having)])}"))


def numbered(names: list[str]) -> list[str]:
    """Return the names with the number of each row.

    Long names lose their date and the words with which all begin, except the last of these, which may be a key. Names
    that would no longer be distinct stay whole.
    """
    if len(names) > 1 and max(map(len, names)) > LONG:
        words = [DATE.sub("", name).split("-") for name in names]
        common = sum(1 for _ in itertools.takewhile(lambda each: len(set(each)) == 1, zip(*words, strict=False)))
        short = ["-".join(each[max(0, common - 1) :]) for each in words]
        names = short if len(set(short)) == len(names) else names
    return [f"{n:>{len(str(len(names)))}} {name}" for n, name in enumerate(names, start=1)]


def sort_by(runs: list[Run], by: str) -> None:
    """Let all runs watch a metric. Larger values are better for `max NAME`, and where the name says so."""
    metric = by.removeprefix("max ").removeprefix("min ")
    known = {name for run in runs for name in run.metrics}
    if metric not in known:
        raise ConfigError(f"--by={by}: no run has this metric; {nearest(metric, known)}")
    if by == metric and not usually(metric):
        raise ConfigError(f"--by={by}: its name does not say what is better; give --by='max {by}' or 'min {by}'")
    watch(runs, f"max {metric}" if by.startswith("max ") or (by == metric and usually(metric) > 0) else metric)


def watch(runs: list[Run], stated: str) -> None:
    for run in runs:
        run.summary = {**run.summary, "best": {"metric": stated}}


def watched(runs: list[Run]) -> str:
    """Return the metric that decides which run is better: the one that `keep_best` names, or one of the validation.

    Without a validation it is the training loss.
    """
    found = [run.summary.get("best") for run in runs]
    stated = [best.get("metric") for best in found if isinstance(best, Mapping)]
    stated += [run.config.get("trainer.checkpoint.keep_best") for run in runs]
    if one := next((each for each in stated if isinstance(each, str)), ""):
        watch(runs, one)  # also those that have none yet
    chosen = [one.removeprefix("max ")]
    known = sorted({name for run in runs for name in run.metrics})
    validated = [name for name in known if name.startswith("val/") and any(direction(run, name) for run in runs)]
    order = (*chosen, "val/loss", *validated, "train/loss")
    return next((name for name in order if name in known), "val/loss")


def ordered(runs: list[Run], metric: str) -> list[Run]:
    """Sort runs by the metric: the best first, and last those without a value."""
    best = [best_of(run, metric) if metric in run.metrics else None for run in runs]
    ranks = [-direction(run, metric) * one[0] if one else math.inf for run, one in zip(runs, best, strict=True)]
    return [run for _, run in sorted(zip(ranks, runs, strict=True), key=lambda pair: pair[0])]


def columns(runs: list[Run], metric: str, everything: bool) -> list[Column]:
    took = [duration(run.metrics["seconds"].high.value) if "seconds" in run.metrics else "" for run in runs]
    best = [best_of(run, metric) if metric in run.metrics else None for run in runs]
    changed = differences(runs)
    shown = [Column(f"best {metric}", [value_of(one[0], metric) if one else "" for one in best])] if any(best) else []
    for key in sorted(changed):
        values = [as_yaml(value)[:200] if run.config else "" for value, run in zip(changed[key], runs, strict=True)]
        shown.append(Column(key, values))
    shown += [Column("at step", [f"{one[1]:,}" if one else "" for one in best])] if any(best) else []
    shown += [
        Column("state", [run.state.partition(": ")[0] for run in runs]),
        Column("steps", [f"{run.last_step:,}" for run in runs]),
        Column("time", took),
    ]
    return shown + [Column(name, [last(run, name) for run in runs]) for name in chosen(runs, everything)]


def last(run: Run, name: str) -> str:
    return value_of(run.metrics[name].last.value, name) if name in run.metrics else ""


def chosen(runs: list[Run], everything: bool) -> list[str]:
    known = {name for run in runs for name in run.metrics} - set(CLOCKS)
    names = sorted(known, key=lambda name: (not name.startswith("val/"), name))
    return names if everything else [name for name in names if name.startswith("val/") or name in SHOWN]


def blocks(columns: list[Column], names: Column, width: int) -> list[list[Column]]:
    """Split the columns into tables that fit into `width` and each begin with the runs' names."""
    found, room = list[list[Column]](), 0
    for column in columns:
        if not found or column.width + GAP > room:
            found.append([])
            room = width - min(names.width, width // 2)
        found[-1].append(column)
        room -= column.width + GAP
    return found


def made(columns: list[Column]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for n, column in enumerate(columns):
        head = Text(printable(column.head))
        table.add_column(head, justify="right" if n else "left", overflow="fold", max_width=WIDEST if n else None)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def as_object(runs: list[Run]) -> dict[str, Any]:
    """Return the comparison as JSON values; null for values that are not finite."""
    names = chosen(runs, True)
    changed = differences(runs)
    return {
        "runs": [
            {
                "name": run.name,
                "folder": str(run.folder),
                "state": run.state,
                "steps": run.last_step,
                "changed": {key: values[i] for key, values in changed.items()},
                "metrics": {name: values_of(run, name) for name in names if name in run.metrics},
                "missing": run.notes,
            }
            for i, run in enumerate(runs)
        ]
    }


def values_of(run: Run, name: str) -> dict[str, Any]:
    metric, best = run.metrics[name], best_of(run, name)
    last = metric.last.value if math.isfinite(metric.last.value) else None
    return {"last": last, "step": metric.last.step, "best": best and best[0], "best_step": best and best[1]}


def main() -> int:
    parser = ArgumentParser(prog="echelon compare", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, as in runs/NAME")
    parser.add_argument("--json", action="store_true", help="prints JSON, with all metrics")
    parser.add_argument("--by", metavar="METRIC", help="sorts by this metric: NAME, 'max NAME' or 'min NAME'")
    parser.add_argument("--all", action="store_true", help="shows all metrics, not only val/, train/loss and speed")
    given = parser.parse_args()
    tolerate_closed_pipes()
    return run_guarded(lambda: compare(given.runs, given.json, given.all, given.by))


if __name__ == "__main__":
    sys.exit(main())
