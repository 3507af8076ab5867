"""Lays out the page: cards of runs, charts by section, tables of metrics, events, advice and configs."""

import base64
import hashlib
import json
import math
import time
from pathlib import Path
from typing import Any

from trainer.errors import printable
from trainer.tools.report.html import Html, join, script_json, tag
from trainer.tools.report.lines import number, whole
from trainer.tools.report.names import SECTIONS, TITLES
from trainer.tools.report.payload import CLOCKS, MOST_BARS, Chart, make_payload
from trainer.tools.report.run import Run, best_of
from trainer.tools.report.tables import exchanges, metrics_table, tables, value_of

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("format.js", "view.js", "chart.js", "cursor.js", "page.js")
BADGES = {"finished": "good", "crashed": "bad", "diverged": "bad", "running or killed": "open"}


def make_page(runs: list[Run]) -> str:
    """Return the page: one HTML document that loads nothing."""
    data, charts = make_payload(runs)
    style = (ASSETS / "page.css").read_text()
    script = "\n".join((ASSETS / name).read_text() for name in SCRIPTS)
    policy = f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; base-uri 'none'"
    title = f"{', '.join(run.name for run in runs[:3])}{' ...' if len(runs) > 3 else ''} - Echelon"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", printable(title)),
        tag("style", Html(style)),
    )
    cards = tag("div", *(card(i, run, runs) for i, run in enumerate(runs)), class_="grid cards")
    overview = tag("section", cards, id="runs")
    sections = [overview, *chart_sections(runs, charts), metrics_table(runs), *tables(runs), about(runs)]
    body = tag(
        "body",
        tag("a", "Skip to the curves", href="#main", class_="skip"),
        bar(runs),
        tag("main", *sections, id="main"),
        tag("script", script_json(json.dumps(data, allow_nan=False)), id="data", type="application/json"),
        tag("script", Html(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def digest(text: str) -> str:
    """Return the content security policy's source that allows only this inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def bar(runs: list[Run]) -> Html:
    names = {"step": "Step", "seconds": "Time", "samples": "Samples"}
    axes = ["step", *(clock for clock in CLOCKS if any(clock in run.metrics for run in runs))]
    options = [tag("option", names[axis], value=axis) for axis in axes]
    heading = "Echelon report" if len(runs) == 1 else f"Echelon report: {len(runs)} runs"
    controls = tag(
        "div",
        tag("label", "Axis ", tag("select", *options, id="axis")),
        tag(
            "label", "Smoothing ", tag("input", id="smooth", type="range", min=0, max=99, value=0),
            tag("output", "0.00", id="smoothed", for_="smooth"),
        ),
        tag("label", tag("input", id="log", type="checkbox"), "Log scale"),
        tag("label", tag("input", id="events-shown", type="checkbox", checked=True), "Events"),
        tag("button", "Show all", id="all", type="button", disabled=True),
        class_="controls",
    )  # fmt: skip
    return tag("header", tag("div", tag("h1", heading), controls), class_="bar")


def card(i: int, run: Run, runs: list[Run]) -> Html:
    switch = None
    if len(runs) > 1:
        label, place = f"Show {run.name}", f"swatch run-{i % 8}"
        names = {"aria_pressed": "true", "aria_label": label, "title": label}
        switch = tag("button", class_=place, data_run=i, type="button", **names)
    badge = tag("span", run.state, class_=f"badge {BADGES.get(run.state, 'open')}")
    facts = [tag("div", tag("dt", name), tag("dd", *values)) for name, *values in numbers(run)]
    notes = [tag("li", printable(note)) for note in run.notes]
    return tag(
        "article",
        tag("header", switch, tag("h3", printable(run.name)), badge),
        tag("p", run.error, class_="error") if run.error else None,
        tag("dl", *facts),
        tag("ul", *notes, class_="notes", aria_label="What is missing") if notes else None,
        class_="card" if len(runs) > 1 else "card wide",
    )


def numbers(run: Run) -> list[tuple[Any, ...]]:
    summary, metrics, found = run.summary, run.metrics, []
    planned = whole(run.config.get("trainer.max_steps"))
    steps = max(run.last_step, whole(summary.get("steps")) or 0)
    of = tag("small", f"of {planned:,}") if planned is not None and planned != steps else None
    found.append(("Steps", f"{steps:,}", of))
    if "seconds" in metrics:
        found.append(("Training time", duration(metrics["seconds"].high.value)))
    starts = [event for event in run.events if whole(event.get("ranks")) is not None]
    start = starts[-1] if starts else {}
    ranks = whole(summary.get("ranks")) or start.get("ranks")
    if ranks is not None:
        where = printable(str(summary.get("device") or start.get("device", "")))[:60]
        found.append(("Ranks", f"{ranks:,}", tag("small", where)))
    for name in ("train/loss", "val/loss"):
        if name in metrics:
            best = best_of(run, name)
            note = best and tag("small", f"best {value_of(best[0], name)} at step {best[1]:,}")
            found.append((TITLES[name], value_of(metrics[name].last.value, name), note))
    watched = summary.get("best")
    if isinstance(watched, dict) and str(watched.get("metric", "val/loss")) != "val/loss":
        found.append((f"Best {printable(str(watched['metric']))[:60]}", f"{number(watched.get('value')):.4g}"))
    for name, heading in (("perf/tokens_per_s", "Tokens per second"), ("perf/samples_per_s", "Samples per second")):
        if name in metrics:
            found.append((heading, value_of(metrics[name].last.value, name)))
            break
    for name in ("perf/peak_memory_gib", "perf/peak_rss_gib"):
        if name in metrics:
            found.append(("Peak memory", value_of(metrics[name].high.value, name)))
    return found


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if hours < 1:
        return f"{int(minutes)} min {int(seconds % 60)} s"
    return f"{int(hours)} h {int(minutes % 60)} min" if days < 2 else f"{int(days)} d {int(hours % 24)} h"


def chart_sections(runs: list[Run], charts: list[Chart]) -> list[Html]:
    found = []
    for section, heading in SECTIONS.items():
        own = [(i, chart) for i, chart in enumerate(charts) if chart.section == section]
        figures = [figure(i, chart) for i, chart in sorted(own, key=lambda one: not one[1].spec.get("stack"))]
        if section == "time":
            figures += [rank_bars(i, run, len(runs) > 1) for i, run in enumerate(runs) if run.ranks.ranks]
        if section == "comm":
            figures += [exchanges(run, len(runs) > 1) for run in runs if run.exchanges]
        if figures:
            found.append(tag("section", tag("h2", heading), tag("div", *figures, class_="grid"), id=section))
    return found


def figure(i: int, chart: Chart) -> Html:
    spec = chart.spec
    lasts = [f"{one['label']} {one['last']:.4g}" for one in spec["lines"][:8] if one["last"] is not None]
    label = f"{spec['title']}: {', '.join(lasts)}. Arrow keys move the crosshair, + and - zoom, 0 shows all, l is log."
    switch = None if spec.get("stack") else tag("button", "log", type="button", aria_pressed="false")
    return tag(
        "figure",
        tag("figcaption", tag("h3", printable(spec["title"])), switch),
        tag("ul", class_="legend"),
        tag("canvas", tabindex=0, role="img", aria_label=label),
        class_="chart wide" if chart.wide else "chart",
        data_chart=i,
    )


def rank_bars(i: int, run: Run, several: bool) -> Html:
    title = f"Ranks of {run.name}" if several else "Each rank"
    if run.ranks.ranks > MOST_BARS:
        title += f": the {MOST_BARS} slowest of {run.ranks.ranks:,}"
    caption = tag("figcaption", tag("h3", printable(title)), tag("small"))
    bars = tag("div", class_="ranks")
    return tag("figure", caption, tag("ul", class_="legend"), bars, class_="wide", data_ranks=i)


def about(runs: list[Run]) -> Html:
    curves = [metric for run in runs for name, metric in run.metrics.items() if name not in CLOCKS]
    merged = any(not metric.ranges.exact for metric in curves)
    reduced = (
        "A point is the mean of a range of steps. The band behind it reaches from the smallest to the largest value. "
        if merged
        else "Every logged value is a point. "
    )
    how = (
        "Drag across a chart to zoom all charts, and double-click to see all. With a chart in focus, arrow keys move "
        "the crosshair, + and - zoom, Page Up and Page Down pan, 0 shows all, and l switches to a log scale. "
        "Red triangles mark values that are not finite. Solid lines mark crashes, dashed lines restarts, resumes and "
        "skipped steps; ticks on the axis mark checkpoints and validations. "
    )
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return join(tag("footer", tag("p", reduced, how), tag("p", f"Made on {made} by Echelon. The page loads nothing.")))
