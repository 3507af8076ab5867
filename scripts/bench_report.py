"""What the benchmark scripts share: their options, their tables, their goals, and the machine they ran on."""

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # column -> value, the same columns in every row of a table


@dataclass(frozen=True)
class Goal:
    name: str
    goal: str
    value: float
    met: bool


def at_most(name: str, bound: float, value: float) -> Goal:
    return Goal(name, f"at most {bound:g}", value, value <= bound)


def parser(doc: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="write rows, goals and the machine there")
    made.add_argument("--quick", action="store_true", help="fewer repetitions: under 2 minutes")
    return made


def report(tables: Sequence[list[Row]], goals: list[Goal], about: Row, file: Path | None) -> None:
    """Print the tables, then the goals, a line each; the rows of all tables go into one list of the JSON."""
    for rows in tables:
        print_table(rows)
    for goal in goals:
        print(f"- {goal.name}: {goal.goal}, measured {goal.value:.4g}, {'met' if goal.met else 'missed'}")
    if file is not None:
        rows = [row for table in tables for row in table]
        everything = {"machine": about, "rows": rows, "goals": [dataclasses.asdict(goal) for goal in goals]}
        file.write_text(json.dumps(everything, indent=1) + "\n")


def print_table(rows: list[Row]) -> None:
    """As Markdown, aligned; `part`, the same in every row, is the title."""
    print(f"**{rows[0]['part']}**\n")
    columns = [name for name in rows[0] if name != "part"]
    cells = [columns, *([show(row[name]) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    for line in cells:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
    print()


def show(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}"


def machine(packages: Sequence[str]) -> Row:
    """With the versions of `packages` that are installed, and the commit where there is one."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    git = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),  # of the last minute, before the benchmark
        "system": platform.platform(terse=True),
        "date": time.strftime("%Y-%m-%d"),
        "commit": git.stdout.strip(),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages if installed(package)},
    }


def installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
