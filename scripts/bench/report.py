"""The parts that all benches share: options, the machine, ratios, tables and goals."""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from trainer.config.tuned import cpu_name

Row = dict[str, Any]  # column -> value, the same columns in every row of a table


@dataclass(frozen=True)
class Goal:
    """A bound on a measured value."""

    name: str
    goal: str
    value: float
    met: bool


def at_most(name: str, bound: float, value: float) -> Goal:
    return Goal(name, f"at most {bound:g}", value, value <= bound)


def at_least(name: str, bound: float, value: float) -> Goal:
    return Goal(name, f"at least {bound:g}", value, value >= bound)


def parser(name: str, doc: str | None, quick: str, rounds: str) -> argparse.ArgumentParser:
    """Make the parser of `python -m scripts.bench.NAME`, with the options of every bench.

    `doc`, the description, is the bench's docstring. `quick` and `rounds` tell about these options.
    """
    made = argparse.ArgumentParser(
        f"python -m scripts.bench.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--rounds", type=positive, help=rounds)
    made.add_argument("--json", type=new_file, metavar="FILE", help="write rows, goals and the machine to FILE")
    return made


def positive(word: str) -> int:
    number = int(word) if word.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word}: give a whole number, 1 or more")
    return number


def new_file(word: str) -> Path:
    """Check before a bench measures that its result can be written."""
    path = Path(word)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{word}: is a folder; name a file")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{word}: {path.parent} is no folder that you may write to; make it first")
    return path


def median_ratio(own: Iterable[float], others: Iterable[float]) -> float:
    """Compute the median over rounds of the ratio within each round."""
    return statistics.median(a / b for a, b in zip(own, others, strict=True))


def report(tables: Sequence[list[Row]], goals: list[Goal], about: Row, file: Path | None) -> None:
    """Print the tables, then a line for each goal; write all of them to `file`, with the rows in one list."""
    for rows in tables:
        print_table(rows)
    for goal in goals:
        print(f"- {goal.name}: {goal.goal}, measured {goal.value:.4g}, {'met' if goal.met else 'missed'}")
    if file is not None:
        rows = [row for table in tables for row in table]
        everything = {"machine": about, "rows": rows, "goals": [dataclasses.asdict(goal) for goal in goals]}
        file.write_text(json.dumps(everything, indent=1) + "\n")


def print_table(rows: list[Row]) -> None:
    print(markdown(rows), end="\n\n")


def markdown(rows: list[Row]) -> str:
    """Return an aligned Markdown table; `part`, the same in every row, is the title."""
    columns = [name for name in rows[0] if name != "part"]
    cells = [columns, *([show(row[name]) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    lines = (" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
    return "\n".join([f"**{rows[0]['part']}**\n", *(f"| {line} |" for line in lines)])


def show(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}"


def print_machine(packages: Sequence[str]) -> Row:
    """Print and return the machine, the commit, and the versions of those `packages` that are installed."""
    git = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    about = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),  # of the last minute, before the bench
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
        "system": platform.platform(terse=True),
        "date": time.strftime("%Y-%m-%d"),
        "commit": git.stdout.strip(),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages if installed(package)},
    }
    print(listed(about), end="\n\n")
    return about


def listed(about: Row) -> str:
    return ", ".join(f"{key} {value}" for key, value in about.items())


def machine_line(about: Row) -> str:
    """Return the machine as a line of a page of docs/measurements."""
    return f"Machine: {listed(about)}."


def paragraphs(*parts: str) -> str:
    """Return the text of a page. Empty parts are left out."""
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
