"""Writes docs/composition.md and its picture: pairs of callbacks, and with settings, that work or are refused, and why

    PYTHONPATH=tests python -m support.composition

What the page says is refused is what `arrange` refuses; of what it says works, tests/test_contract.py trains what the
page's head says.
"""

import itertools
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from support.callbacks import CHANGES, CODECS, OBSERVERS, Table, name_of
from trainer.callbacks.bucket.callback import Bucket
from trainer.callbacks.grad_compress import GradCompress
from trainer.composition import arrange
from trainer.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"
PICTURE = PAGE.parent / "images" / "composition.svg"
SETTINGS = {
    "clip": "trainer.clip_norm",
    "clip_value": "trainer.clip_value",
    "fp16": "trainer.precision=fp16",
    "fp8": "trainer.precision=fp8",
    "bf16_params": "trainer.precision=bf16_params",
    "bf16_weights": "trainer.master_weights=false",
    "sync_batch_norm": "trainer.sync_batch_norm",
    "find_unused_parameters": "trainer.ddp.find_unused_parameters",
    "static_graph": "trainer.ddp.static_graph",
    "gradient_as_bucket_view": "trainer.ddp.gradient_as_bucket_view",
}
# Knobs with which a callback refuses more than without them.
KNOBS: Table = {
    "bucket.first_mib": lambda: Bucket(first_mib=1.0),
    "bucket.mibs": lambda: Bucket(mibs=[1.0, 25.0]),
    "bucket.delayed": lambda: Bucket(delayed=["*bias"]),
    "grad_compress.clip_norm": lambda: GradCompress("dgc", clip_norm=1.0),
    "grad_compress.momentum": lambda: GradCompress("dgc", momentum=0.9),
}
ALL = {**CHANGES, **CODECS, **OBSERVERS, **KNOBS}
HEAD = f"""# What composes

You want to combine callbacks, and to know whether they work together. Echelon checks that before a run starts: all
pairs run together except those listed below, which are refused with the reason and, where there is one, the fix.

![The pairs as a picture: a dot is a pair that runs, a number a pair that is refused](images/composition.svg)

{", ".join(f"`{name}`" for name in OBSERVERS)} compose with everything on this page, and with each other.

## What was trained

`tests/test_contract.py` trains the callbacks on 3 ranks, or on 4 with `CONTRACT_RANKS=4`, with accumulation and uneven
batches. It checks that the result equals plain training, or stays within the stated bound, and that a resume repeats
the bits. `./scripts/test` trains some callbacks and codecs by themselves, and some pairs that change the same thing.
`./scripts/test -m pairs` trains all other callbacks and codecs, every pair (with the codec bf16 for `grad_compress`),
and every codec with `overlap` and `local_sgd`. There, `auto_batch` and `hetero_batch` split batches evenly; their own
tests use uneven splits. `tests/test_settings.py` trains most callbacks with each setting of DDP, with clipping and with
fp16. No test trains callbacks with `sync_batch_norm`, which needs GPUs.

`tests/support/composition.py` makes this page from the roles and conflicts of callbacks, and a test fails if the page
is outdated.

## Pairs that are refused

Each callback or codec is followed by what it does not run with, and by the number of the [reason](#reasons). A codec
stands for `grad_compress` with that codec.
"""


def refusal(one: str, other: str) -> str:
    """What `arrange` says of two callbacks, or of a callback and a setting; empty where it takes them."""
    rows = [one] if other in SETTINGS else [one, other]
    if "between nodes" in one + other and "hierarchical" not in rows:
        rows.append("hierarchical")  # which it needs
    try:
        arrange({name_of(row): ALL[row]() for row in rows}, {other} & SETTINGS.keys())
    except ConfigError as error:
        return str(error)
    return ""


def more_refused() -> list[str]:
    """Of each of `KNOBS`: what is refused with it alone."""
    lines = []
    for row in KNOBS:
        plain = name_of(row) if name_of(row) in CHANGES else "dgc"
        reasons = {refusal(row, other): None for other in (*CHANGES, *SETTINGS) if not refusal(plain, other)}
        lines += [f"- `{row}`: {reason}" for reason in reasons if reason]
    return lines


class Matrix(NamedTuple):
    rows: list[str]
    columns: list[str]
    cells: dict[tuple[str, str], str]  # "+" for a pair that works, the number of its reason, "" for the same callback
    reasons: list[str]


@cache
def matrix() -> Matrix:
    for one, other in itertools.product(OBSERVERS, [*ALL, *SETTINGS]):
        assert one == other or not refusal(one, other), (one, other)
    rows, columns = [*CHANGES, *CODECS], [*CHANGES, *SETTINGS]
    cells: dict[tuple[str, str], str] = {}
    reasons: list[str] = []
    for row, column in itertools.product(rows, columns):
        own = column in CHANGES and name_of(row) == name_of(column)
        reason = "" if own else re.sub(r"codec=\w+ (?=gather|keep)", "the codec ", refusal(row, column))
        if reason and reason not in reasons:
            reasons.append(reason)
        cells[row, column] = str(reasons.index(reason) + 1) if reason else "" if own else "+"
    return Matrix(rows, columns, cells, reasons)


def page() -> str:
    rows, columns, cells, reasons = matrix()
    lines = []
    for row in rows:
        refused = [f"{column} [{cells[row, column]}]" for column in columns if cells[row, column] not in ("+", "")]
        lines.append(f"- **{row}**: {', '.join(refused) or 'none'}")
    settings = [f"`{name}` is `{key}`." for name, key in SETTINGS.items() if name not in key.split(".")[-1:]]
    numbered = [f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)]
    knobs = ["", "## Knobs that refuse more", "", *more_refused()]
    return "\n".join([HEAD, *lines, "", " ".join(settings), "", "## Reasons", "", *numbered, *knobs, ""])


SIZE, LEFT, TOP, GAP = 20, 200, 170, 10  # pixels: of a cell, of the labels, between kinds of rows and columns
STYLE = """
    svg { --paper: #ffffff; --ink: #24292f; --line: #d0d7de; --runs: #0f8a6c; --refused: #b3470b; --own: #e6e9ed }
    @media (prefers-color-scheme: dark) {
      svg { --paper: #1e2129; --ink: #dde1e7; --line: #3d444d; --runs: #3fbf9b; --refused: #f0883e; --own: #333943 } }
    text { font: 11px system-ui, sans-serif; fill: var(--ink) }
    .number { font-size: 9px; text-anchor: middle; fill: var(--refused) }
    .paper { fill: var(--paper); stroke: var(--line) } .runs { fill: var(--runs) } .own { fill: var(--own) }
    .refused { fill: var(--refused); fill-opacity: .18; stroke: var(--refused); stroke-width: .7 }
"""


def picture() -> str:
    """The matrix as an SVG, with colours for light and dark."""
    rows, columns, cells, _ = matrix()
    x = {name: LEFT + SIZE * i + GAP * (name in SETTINGS) for i, name in enumerate(columns)}
    y = {name: TOP + SIZE * i + GAP * (name in CODECS) for i, name in enumerate(rows)}
    width, height = max(x.values()) + 100, max(y.values()) + 60
    lines = [f'<text x="{LEFT - 8}" y="{y[row] + 14}" text-anchor="end">{row}</text>' for row in rows]
    for column in columns:
        place = f"translate({x[column] + 9} {TOP - 6}) rotate(-60)"
        lines.append(f'<text transform="{place}">{column}</text>')
    lines += [cell(x[column], y[row], cells[row, column]) for row in rows for column in columns]
    foot = height - 18
    lines.append(f'{cell(LEFT, foot - 14, "+")}<text x="{LEFT + 24}" y="{foot}">run together</text>')
    lines.append(f'{cell(LEFT + 130, foot - 14, "1")}<text x="{LEFT + 154}" y="{foot}">refused, with the reason</text>')
    lines.append(f'{cell(LEFT + 320, foot - 14, "")}<text x="{LEFT + 344}" y="{foot}">one callback</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    paper = f'<rect class="paper" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", paper, *lines, "</svg>", ""])


def cell(x: int, y: int, value: str) -> str:
    if value == "+":
        return f'<circle class="runs" cx="{x + 9}" cy="{y + 9}" r="4"/>'
    kind, size = ("refused", SIZE - 3) if value else ("own", SIZE - 2)
    number = f'<text class="number" x="{x + 9.5}" y="{y + 13}">{value}</text>' if value else ""
    return f'<rect class="{kind}" x="{x + 1}" y="{y + 1}" width="{size}" height="{size}" rx="3"/>{number}'


if __name__ == "__main__":
    PAGE.write_text(page())
    PICTURE.write_text(picture())
