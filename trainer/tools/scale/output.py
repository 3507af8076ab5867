"""Shows rows as a table, as JSON or as a plot."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError, printable
from trainer.tools.scale.rows import Row

COLUMNS = (
    "nodes", "ranks", "way", "batch", "step ms", "samples/s", "efficiency", "exposed", "GiB", "checkpoint s", "MTBF h",
    "save every", "lost", "net samples/s",
)  # fmt: skip

PARTS = (  # of the picture: fields of a row, and what their axes say
    ("samples_per_s", "samples a second"), ("efficiency", "of a lone rank's speed"),
    ("exposed", "of the step, waiting"), ("memory_gib", "GiB"), ("checkpoint_s", "seconds of a checkpoint"),
    ("mtbf_h", "hours between failures"),
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.nodes), str(row.ranks), row.way, str(row.batch), f"{row.step_s * 1e3:,.1f}",
        f"{row.samples_per_s:,.0f}", f"{row.efficiency:.3f}", f"{row.exposed:.3f}",
        f"{row.memory_gib:.1f}{'' if row.fits else ' !'}", f"{row.checkpoint_s:.2f}", f"{row.mtbf_h:.1f}",
        duration(row.interval_s), f"{row.lost:.4f}", f"{row.net_samples_per_s:,.0f}",
    )  # fmt: skip


def duration(seconds: float) -> str:
    unit, name = (1, "s") if seconds < 120 else (60, "min") if seconds < 7200 else (3600, "h")
    return f"{seconds / unit:.1f} {name}"


def table(rows: Sequence[Row]) -> str:
    """Return an aligned Markdown table. `!` marks rows that do not fit into memory."""
    lines = [COLUMNS, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    padded = ([cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def write_json(path: Path, about: dict[str, Any], rows: Sequence[Row], left_out: Sequence[str]) -> None:
    everything = {**about, "rows": [asdict(row) for row in rows], "left_out": list(left_out)}
    save("--json", path, lambda: path.write_text(json.dumps(everything, indent=1, default=str) + "\n"))


def save(flag: str, path: Path, write: Any) -> None:
    try:
        write()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}; name a file in a folder of yours") from None


def plot(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Plot `PARTS` over ranks, a line per strategy. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(2, 3).flat, PARTS, strict=True):
        for way in dict.fromkeys(row.way for row in rows):
            own = [row for row in rows if row.way == way]
            values = [getattr(row, name) for row in own]
            axes.plot([row.ranks for row in own], values, marker="o", markersize=3, label=way)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("ranks")
        axes.set_ylabel(label)
        if name == "samples_per_s":
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(printable(title))
    save("--png", path, lambda: figure.savefig(path, dpi=110))
