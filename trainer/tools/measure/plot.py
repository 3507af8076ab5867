"""Draws bus bandwidth over message sizes, a panel for each level of the network."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.comm.bandwidth import BUS_FACTORS, HOPS
from trainer.errors import ConfigError


def require_matplotlib(png: Path | None) -> None:
    """Refuse --png without matplotlib, before a tool measures anything."""
    if png and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png: needs matplotlib; pip install 'matplotlib>=3.9,<4', or leave --png out")


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of a bench's JSON. Dashed lines are the fits. Needs matplotlib."""
    from matplotlib.figure import Figure

    rows: Sequence[Mapping[str, Any]] = report["collectives"]
    levels = list(dict.fromkeys(row["level"] for row in rows)) or [""]
    figure = Figure(figsize=(6 * len(levels), 4.5), layout="constrained")
    figure.suptitle(report["about"])
    for level, axes in zip(levels, figure.subplots(1, len(levels), squeeze=False)[0], strict=True):
        for number, name in enumerate(dict.fromkeys(row["collective"] for row in rows if row["level"] == level)):
            own = [row for row in rows if (row["level"], row["collective"]) == (level, name)]
            sizes, colour = [row["bytes"] for row in own], f"C{number}"
            axes.plot(sizes, [row["busbw"] / 1e6 for row in own], "o-", color=colour, label=name, markersize=3)
            fit = next(fit for fit in report["fits"] if (fit["level"], fit["collective"]) == (level, name))
            axes.plot(sizes, [fitted(fit, row) / 1e6 for row in own], "--", color=colour, linewidth=1)
        axes.set(
            title=f"{level}, dashed: fitted", xlabel="bytes", ylabel="bus bandwidth, MB/s", xscale="log", yscale="log"
        )
        axes.grid(True, which="both", alpha=0.3)
        if rows:
            axes.legend()
    figure.savefig(path, format="png", dpi=120)


def fitted(fit: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """Return the bus bandwidth of a row according to the fit."""
    sent = row["bytes"] * BUS_FACTORS[row["collective"]](row["ranks"])
    seconds = HOPS[row["collective"]](row["ranks"]) * fit["latency_s"] + sent / (fit["bytes_per_s"] or math.inf)
    return sent / seconds if seconds else math.nan
