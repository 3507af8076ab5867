"""echelon compare RUN...: shows in tables how runs differ, with changed keys, last and best metrics."""

import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.annotated import as_yaml
from trainer.errors import printable
from trainer.files import finite
from trainer.process.arguments import ArgumentParser
from trainer.process.exit import run_guarded
from trainer.process.stdio import tolerate_closed_pipes
from trainer.tools.report.payload import CLOCKS
from trainer.tools.report.run import Run, best_of, differences, names_of, read_run
from trainer.tools.report.tables import value_of

GROUPS = ("train/", "val/", "perf/")  # metrics that are shown without --all
CELL = 14  # columns of a value, at least


def compare(folders: list[Path], as_json: bool, everything: bool) -> int:
    runs = [read_run(folder, name, 1, 1) for folder, name in zip(folders, names_of(folders), strict=True)]
    if as_json:
        print(json.dumps(finite(as_object(runs)), indent=1, default=str))
        return 0
    console = Console(highlight=False, markup=False)
    names = chosen(runs, everything)
    for block in blocks(runs, console.width):
        console.print(made("", "", block, outcomes(block)))
        if changed := differences(runs):
            rows = [[key, *(as_yaml(run.config.get(key))[:200] for run in block)] for key in sorted(changed)]
            console.print(made("changed keys", "key", block, rows))
        rows = [[name, *(cell(run, name) for run in block)] for name in names]
        console.print(made("last, and best at its step", "metric", block, rows))
    console.print()
    for run in runs:
        for note in run.notes:
            console.print(Text(printable(f"{run.name}: {note}")), soft_wrap=True)
    if len(runs) > 1:
        print(printable(f"curves: {shlex.join(['echelon', 'report', *map(str, folders)])}"))
    return 0


def chosen(runs: list[Run], everything: bool) -> list[str]:
    names = sorted({name for run in runs for name in run.metrics} - set(CLOCKS))
    return names if everything else [name for name in names if name.startswith(GROUPS)]


def blocks(runs: list[Run], width: int) -> list[list[Run]]:
    fit = max(1, (width - 26) // (CELL + 2))
    return [runs[i : i + fit] for i in range(0, len(runs), fit)]


def made(title: str, first: str, runs: list[Run], rows: list[list[str]]) -> Table:
    title = f"\n{title}" if title else ""
    table = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False, expand=False)
    table.add_column(first, overflow="fold", max_width=32)
    for run in runs:
        table.add_column(Text(printable(run.name)), justify="right", overflow="fold", min_width=CELL)
    for row in rows:
        table.add_row(*(Text(printable(text, keep="\n")) for text in row))
    return table


def outcomes(runs: list[Run]) -> list[list[str]]:
    return [
        ["state", *(run.state for run in runs)],
        ["steps", *(f"{run.last_step:,}" for run in runs)],
        ["seconds", *(f"{run.metrics['seconds'].high.value:,.1f}" if "seconds" in run.metrics else "" for run in runs)],
    ]


def cell(run: Run, name: str) -> str:
    """Return the last value, and below it the best one and its step."""
    metric = run.metrics.get(name)
    if metric is None:
        return ""
    best = best_of(run, name)
    last = value_of(metric.last.value, name)
    return f"{last}\n{value_of(best[0], name)} @ {best[1]:,}" if best and best[1] != metric.last.step else last


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
    parser.add_argument("--all", action="store_true", help="shows all metrics, not only train/, val/ and perf/")
    given = parser.parse_args()
    tolerate_closed_pipes()
    return run_guarded(lambda: compare(given.runs, given.json, given.all))


if __name__ == "__main__":
    sys.exit(main())
