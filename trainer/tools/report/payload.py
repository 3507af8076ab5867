"""The data of the page: charts with their curves, and arrays of numbers that charts share."""

import base64
import math
from typing import Any, NamedTuple

import numpy as np

from trainer.errors import printable
from trainer.tools.doctor.finding import size as in_words
from trainer.tools.report.lines import number
from trainer.tools.report.metrics import Metric
from trainer.tools.report.names import SECTIONS, TITLES, shown
from trainer.tools.report.run import Run
from trainer.tools.report.step_times import COMPUTE, PARTS, RankTimes

CLOCKS = ("seconds", "samples")  # counters of metrics.jsonl: axes, no curves
MOST_NUMBERS = 400_000  # of all curves together: about 2 MB of the page
MOST_BARS = 48  # ranks with a bar
DETAILS = ("error", "why", "reason", "seconds", "stall", "attempt", "ranks", "rank", "device")  # of an event, in order


class Chart(NamedTuple):
    """A chart of a section; `wide` takes the whole row."""

    section: str
    spec: dict[str, Any]
    wide: bool = False


class Arrays:
    """The page's arrays without duplicates, as base64 of little-endian floats."""

    def __init__(self) -> None:
        self.found: dict[bytes, int] = {}
        self.made: list[dict[str, Any]] = []

    def add(self, values: Any, size: int = 4) -> int:
        """Return the index of an array. Float32 has seven digits, so steps need size 8."""
        with np.errstate(over="ignore"):
            raw = np.ascontiguousarray(values, dtype=f"<f{size}").tobytes()
        key = raw + bytes([size])
        if key not in self.found:
            self.found[key] = len(self.made)
            self.made.append({"bytes": size, "text": base64.b64encode(raw).decode()})
        return self.found[key]


def make_payload(runs: list[Run]) -> tuple[dict[str, Any], list[Chart]]:
    fit(runs)
    arrays = Arrays()
    charts = [*curves(runs, arrays), *stacks(runs, arrays)]
    order = list(SECTIONS)
    charts.sort(key=lambda chart: order.index(chart.section))
    described = [describe(run, arrays) for run in runs]
    return {"runs": described, "charts": [chart.spec for chart in charts], "arrays": arrays.made}, charts


def fit(runs: list[Run]) -> None:
    """Merge points until all curves have at most `MOST_NUMBERS` in total, but keep 250 of each."""
    all_ranges = [metric.ranges for run in runs for metric in run.metrics.values()]
    most = max((one.most for one in all_ranges), default=0)
    while True:
        for one in all_ranges:
            one.most = most
            one.close()
        numbers = sum(len(one.table) * (1 if one.exact else 3) for one in all_ranges)
        if numbers <= MOST_NUMBERS or most < 500:
            return
        most //= 2


def curves(runs: list[Run], arrays: Arrays) -> list[Chart]:
    """Make a line chart for each metric. Training and validation loss share one."""
    names = dict.fromkeys(name for run in runs for name in run.metrics if name not in CLOCKS)
    known = {name: place for place, name in enumerate(TITLES)}
    parts = {f"time/{part}" for part in PARTS}
    charts = []
    for name in sorted(names, key=lambda name: known.get(name, len(known))):
        stacked = name in parts or name == "time/step"
        if stacked or (name == "val/loss" and "train/loss" in names):
            continue
        here, several, both = shown(name), len(runs) > 1, name == "train/loss" and "val/loss" in names
        having = [(i, run) for i, run in enumerate(runs) if name in run.metrics]
        lines = [line(i, run.metrics[name], run.name if several else name, arrays) for i, run in having]
        if both:
            for one in lines:
                one["label"] = f"{one['label']}, training" if several else "training"
            for i, run in enumerate(runs):
                if "val/loss" in run.metrics:
                    label = f"{run.name}, validation" if several else "validation"
                    lines.append({**line(i, run.metrics["val/loss"], label, arrays), "dash": True})
        title = "Loss" if both and len(lines) > 1 else here.title
        dots = name == "time/slowest_rank"  # a rank's number: between two there is nothing
        raw = dots or name == "train/lr"  # nothing to smooth
        spec = {"title": title, "kind": here.kind, "zero": here.zero, "dots": dots, "raw": raw, "lines": lines}
        charts.append(Chart(here.section, spec, wide=False))
    return charts


def line(run: int, metric: Metric, label: str, arrays: Arrays, band: bool = True) -> dict[str, Any]:
    """Return a curve: indices into `arrays`, and the last value, or null if it is not finite."""
    ranges, last = metric.ranges, metric.last.value
    made: dict[str, Any] = {"run": run, "label": printable(label), "last": last if np.isfinite(last) else None}
    made["x"], made["y"] = arrays.add(ranges.steps, 8), arrays.add(ranges.mean)
    if band and not ranges.exact:
        made["low"], made["high"] = map(arrays.add, ranges.bounds)
    if metric.bad:
        made["bad"] = arrays.add(ranges.bad)
    return made


def stacks(runs: list[Run], arrays: Arrays) -> list[Chart]:
    """Make a chart of stacked areas for each run whose metrics have the parts of a step."""
    charts = []
    for i, run in enumerate(runs):
        found = [part for part in PARTS if f"time/{part}" in run.metrics and run.metrics[f"time/{part}"].high.value > 0]
        lines = [{**line(i, run.metrics[f"time/{part}"], part, arrays, False), "colour": part} for part in found]
        lines = [one for one in lines if one["x"] == lines[0]["x"]]  # of the same steps: else they do not add up
        if lines:
            title = f"A step of {run.name}" if len(runs) > 1 else "A step, mean of all ranks"
            spec = {"title": printable(title), "kind": "seconds", "stack": True, "lines": lines}
            charts.append(Chart("time", spec, wide=len(runs) == 1))
    return charts


def describe(run: Run, arrays: Arrays) -> dict[str, Any]:
    axes = {}
    for clock in CLOCKS:
        if clock in run.metrics:
            ranges = run.metrics[clock].ranges
            axes[clock] = [arrays.add(ranges.steps, 8), arrays.add(np.fmax.accumulate(ranges.mean), 8)]
    marks = [{"step": event["step"], "event": event["event"], "text": details(event)} for event in run.events]
    marks += [{"step": item["step"], "event": "advice", "text": printable(item["name"])} for item in run.advice]
    return {"name": printable(run.name), "axes": axes, "events": marks, "ranks": bars(run.ranks, arrays)}


def details(event: dict[str, Any]) -> str:
    words = []
    for key in DETAILS:
        value = event.get(key)
        if key in ("seconds", "stall") and value is not None:
            words.append(f"{'' if key == 'seconds' else 'stall '}{number(value):.3g} s")
        elif value is not None:
            words.append(printable(str(value))[:200] if key in DETAILS[:3] else f"{key} {printable(str(value))[:40]}")
    if event.get("bytes") is not None:
        words.append(size(number(event["bytes"])))
    return ", ".join(words)


def size(count: float) -> str:
    return in_words(count) if math.isfinite(count) else "unknown"


def bars(times: RankTimes, arrays: Arrays) -> dict[str, Any] | None:
    """Return the seconds per span of steps, rank and part, for the slowest `MOST_BARS` ranks.

    The part `rest` is the time that no other part has.
    """
    if not times.ranks:
        return None
    computes = times.means()[:, [PARTS.index(part) for part in COMPUTE]].sum(1)
    ranks = np.sort(np.argsort(-computes, kind="stable")[:MOST_BARS])
    seconds = times.seconds[:, ranks]
    rest = np.maximum(seconds[:, :, -1:] - seconds[:, :, :-1].sum(-1, keepdims=True), 0)
    table = np.concatenate([seconds[:, :, :-1], rest], axis=-1)
    used = table.sum((0, 1)) > 1e-3 * table.sum() / 1e3
    names = [name for name, has in zip((*PARTS, "rest"), used, strict=True) if has]
    return {
        "ranks": ranks.tolist(),
        "parts": names,
        "last": arrays.add(times.last, 8),
        "steps": arrays.add(times.steps[:, ranks]),
        "seconds": arrays.add(table[:, :, used]),
    }
