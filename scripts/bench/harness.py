"""The harness of all benches: options, rounds of turns, ratios, ranks of this machine, tables, goals and files."""

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainer.config.tuned import cpu_name
from trainer.errors import ConfigError
from trainer.files import write_whole
from trainer.process.environment import Place
from trainer.process.exit import die_with_parent

MARK = "<!-- measured -->\n"  # before and after the part of a page that a bench writes
Row = dict[str, Any]  # column -> value, the same columns in every row of a table
Turn = Mapping[str, float]  # the numbers of a turn, by name
Named = TypeVar("Named")


@dataclass(frozen=True)
class Goal:
    name: str
    goal: str
    value: float
    met: bool


def at_most(name: str, bound: float, value: float) -> Goal:
    return Goal(name, f"at most {bound:g}", value, value <= bound)


def at_least(name: str, bound: float, value: float) -> Goal:
    return Goal(name, f"at least {bound:g}", value, value >= bound)


class Failed(Exception):
    """The failure of a turn. The row has no further turns, and the others go on."""


@dataclass
class Rounds:
    """The turns of each row, in the order of rounds, and the errors of the rows that failed."""

    turns: dict[Any, list[Turn]]  # by the row's name, or what else tells rows apart
    failed: dict[Any, str] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Iterable[Any]) -> "Rounds":
        return cls({name: [] for name in names})

    def run(self, rounds: int, take: Callable[[Any], Turn], where: str = "") -> "Rounds":
        """Take a turn of each row in every round. The order is reversed after each round."""
        for n in range(rounds):
            for name in list(self.turns)[:: -1 if n % 2 else 1]:
                try:
                    turn = take(name)
                except Failed as error:
                    self.failed[name], said = str(error), f"failed: {error}"
                    del self.turns[name]
                else:
                    self.turns[name].append(turn)
                    said = ", ".join(f"{key} {value:.4g}" for key, value in turn.items())
                print(f"{where}round {n + 1}/{rounds}: {name}: {said}", file=sys.stderr, flush=True)
        return self

    def values(self, name: str, key: str = "seconds") -> list[float]:
        return [turn[key] for turn in self.turns[name]]

    def median(self, name: str, key: str = "seconds") -> float:
        return statistics.median(self.values(name, key))

    def ratio(self, name: str, base: str, key: str = "seconds") -> float:
        return median_ratio(self.values(name, key), self.values(base, key))

    def table(self, part: str, label: str, columns: Mapping[str, Callable[[str], Any]]) -> list[Row]:
        return [
            {"part": part, label: name, **{column: value(name) for column, value in columns.items()}}
            for name in self.turns
        ]


def on_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(place, *args)` on ranks of this machine: new processes of one thread, in a temporary folder."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=".") as name, ProcessPoolExecutor(world, spawn) as pool:
        folder = os.path.abspath(name)
        places = [Place(rank, world, rank, world, f"{folder}/store", "bench") for rank in range(world)]
        try:
            return list(pool.map(_on_rank, [function] * world, places if world > 1 else [Place()], [folder] * world,
                                 [args] * world))  # fmt: skip
        except BaseException:  # also a signal; without its peers a rank would wait for a time-out
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _on_rank(function: Callable[..., Any], place: Place, folder: str, args: Sequence[Any]) -> Any:
    os.chdir(folder)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with silence():
        return function(place, *args)


def alone(function: Callable[..., Any], *args: Any, limit_s: float | None = None, fork: bool = True) -> Any:
    """Call `function(*args)` in a process of its own, which is killed with all that it has started.

    Raises:
        Failed: The function did, the process ended, or there is no answer at the limit.
    """
    context: Any = multiprocessing.get_context("fork" if fork else "forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_alone, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            raise Failed(f"no result in {limit_s:.0f} s")
        answer = ours.recv()
        process.join(0 if fork else 5)  # one that is forked may have workers, which are in no hurry
    except EOFError:
        process.join()
        raise Failed(f"the process ended with code {process.exitcode}") from None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        ours.close()
    if isinstance(answer, Failed):
        raise answer
    return answer


def _alone(answer: Connection, function: Callable[..., Any], args: Sequence[Any]) -> None:
    os.setsid()
    die_with_parent()  # of which a killed bench is one, or the server that forks for it
    try:
        answer.send(function(*args))
    except Failed as error:
        answer.send(error)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Discard output. Printing stays part of the cost."""
    with contextlib.ExitStack() as stack:
        null = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(null))
        stack.enter_context(contextlib.redirect_stderr(null))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def parser(name: str, doc: str | None, quick: str = "", rounds: str = "", out: str = "") -> argparse.ArgumentParser:
    """Make the parser of `python -m scripts.bench.NAME`, with the options of every bench.

    `doc`, the description, is the bench's docstring. The others are the help of options; without it there is none.
    """
    made = argparse.ArgumentParser(
        f"python -m scripts.bench.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if quick:
        made.add_argument("--quick", action="store_true", help=quick)
    if rounds:
        made.add_argument("--rounds", type=positive, help=rounds)
    made.add_argument("--json", type=new_file, metavar="FILE", help="write rows, goals and the machine to FILE")
    if out:
        made.add_argument("--out", type=new_file, metavar="FILE", help=out)
    return made


def positive(word: str) -> int:
    number = int(word) if word.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word}: give a whole number, 1 or more")
    return number


def new_file(word: str) -> Path:
    path = Path(word)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{word}: is a folder; name a file")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{word}: {path.parent} is no folder that you may write to; make it first")
    return path


def median_ratio(own: Iterable[float], others: Iterable[float]) -> float:
    """Compute the median over rounds of the ratio within each round."""
    return statistics.median(a / b for a, b in zip(own, others, strict=True))


def matching(option: str, pattern: str, choices: Iterable[Named]) -> list[Named]:
    listed = list(choices)
    found = [each for each in listed if re.search(pattern, str(each))]
    if not found:
        raise ConfigError(f"{option} {pattern}: fits none of {'; '.join(map(str, listed))}")
    return found


class Report:
    """The tables and goals of a bench. They are printed and written at the end, also of a bench that was stopped."""

    def __init__(
        self, file: Path | None, packages: Sequence[str] | None = ("torch",), out: Path | None = None
    ) -> None:  # fmt: skip
        self.out = out
        self.file, self.about = file, {} if packages is None else print_machine(packages)
        self.tables, self.goals, self.notes = list[list[Row]](), list[Goal](), list[str]()

    def add(self, rows: list[Row], goals: Iterable[Goal] = ()) -> None:
        self.tables += [rows] if rows else []
        self.goals += goals

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, *_: object) -> None:
        """Print the tables and the goals; write all of them to the file, with the rows in one list."""
        print(self.text(), end="")
        if self.out is not None and self.tables:
            write_page(self.out, paragraphs(machine_line(self.about), self.text()))
        if self.file is not None:
            rows = [row for table in self.tables for row in table]
            everything = {"machine": self.about, "rows": rows, "goals": [dataclasses.asdict(g) for g in self.goals]}
            self.file.write_text(json.dumps(everything, indent=1) + "\n")

    def text(self) -> str:
        goals = (f"- {g.name}: {g.goal}, measured {g.value:.4g}, {'met' if g.met else 'missed'}" for g in self.goals)
        return paragraphs(*map(markdown, self.tables), "\n".join([*goals, *self.notes]))


def write_page(file: Path, text: str) -> None:
    """Put the text between the marks of a page of Markdown, or make the page."""
    page = file.read_text() if file.exists() else f"# {file.stem}\n\n{MARK}{MARK}"
    head, _, rest = page.partition(MARK)
    file.write_text(f"{head}{MARK}{text}{MARK}{rest.partition(MARK)[2]}")


class Record(dict[str, Any]):
    """The JSON file that a bench keeps for a further call. A file of other settings is refused."""

    def __init__(self, file: Path | None, settings: Row, **empty: Any) -> None:
        super().__init__({"settings": settings, **empty})
        self.file = file
        if file is not None and file.exists():
            there = json.loads(file.read_text())
            if there.get("settings") != settings:
                raise ConfigError(f"--json {file}: is of {there.get('settings')}, not of {settings}; name another file")
            self.update({key: there[key] for key in empty})

    def write(self) -> None:
        if self.file is not None:
            write_whole(self.file, f"{json.dumps(self, indent=1)}\n".encode())


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
    return textwrap.fill(f"Machine: {listed(about)}.", 118)


def paragraphs(*parts: str) -> str:
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def missing(packages: Iterable[str]) -> str:
    lacks = [package for package in packages if not installed(package)]
    return f"needs {' and '.join(lacks)} (extra [peers])" if lacks else ""


def installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
