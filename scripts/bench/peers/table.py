"""The numbers of a run, and the tables of the bench."""

import ast
import io
import itertools
import statistics
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.bench.harness import Rounds, Row

MARK = "# bench"  # ends a line that only the bench needs
MIB = 1 << 20
BARE = "bare loop"
COLUMNS = {  # of a table -> the unit's number of a run
    "first step, s": "first_s",
    "resume, s": "resume_s",
    "stall, ms": "stall_ms",
    "peak, MiB": "peak_mib",
}


def numbers(began: float, ticks: Sequence[float], peak: float, warm: int, save_at: int) -> dict[str, float]:
    """Return the numbers of a run, from the times of its start and of the ends of its steps.

    Args:
        peak: Bytes.
        warm: Steps before those that are timed.
        save_at: The step that ends the timed ones, at whose end the checkpoint is saved.
    """
    steps = [after - before for before, after in itertools.pairwise(ticks)]  # steps[i] is that of step i + 2
    usual = statistics.mean(steps[warm - 1 : save_at - 2])
    saving = steps[save_at - 2 :]  # a peer saves before the tick of this step, or after it
    return {
        "first_s": ticks[0] - began,
        "step_s": usual,
        "stall_ms": 1000 * (sum(saving) - usual * len(saving)),
        "peak_mib": peak / MIB,
    }


def lines_of_code(script: Path) -> int:
    """Count the lines that a user writes: without blank ones, comments, docstrings and those that end in `MARK`."""
    text = script.read_text()
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    docs = [node.body[0] for node in nodes if ast.get_docstring(node) is not None]
    without = {line for node in docs for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    without |= {number for number, line in enumerate(text.splitlines(), 1) if line.endswith(MARK)}
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = [token for token in tokens if token.type not in nothing]
    return len({line for token in code for line in range(token.start[0], token.end[0] + 1)} - without)


def rows(part: str, found: Rounds, lines: Mapping[str, int | str]) -> list[Row]:
    """Make a row for each peer of `lines`: its numbers in the rounds, or why it has none."""
    made = list[Row]()
    for name in lines:
        row: Row = {"part": part, "peer": name, "rounds": 0, "ms a step": found.failed.get(name, "no bare loop")}
        row |= {"speed, of the bare loop": "-", **dict.fromkeys(COLUMNS, "-"), "lines": lines[name]}
        if name in found.turns and BARE in found.turns:
            row |= {"rounds": len(found.turns[name]), "ms a step": 1000 * found.median(name, "step_s")}
            row["speed, of the bare loop"] = found.ratio(BARE, name, "step_s")
            there = {column: key for column, key in COLUMNS.items() if key in found.turns[name][0]}
            row |= {column: found.median(name, key) for column, key in there.items()}
        made.append(row)
    return made
