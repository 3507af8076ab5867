"""Tables of the page: metrics, collectives, events, advice and configs."""

import math
import time
from typing import Any

import numpy as np

from trainer.annotated import as_yaml
from trainer.errors import printable
from trainer.tools.report.comm import Exchange
from trainer.tools.report.html import Html, tag
from trainer.tools.report.lines import number
from trainer.tools.report.names import shown
from trainer.tools.report.payload import CLOCKS, details, size
from trainer.tools.report.run import Run, best_of, differences

MOST_ROWS = 400  # events that the table shows, the newest
UNITS = {"share": (100, " %"), "seconds": (1, " s"), "GiB": (1, " GiB"), "MiB": (1, " MiB"), "MiB/s": (1, " MiB/s")}
UNITS |= {"W": (1, " W"), "C": (1, " \u00b0C"), "MHz": (1, " MHz")}


def value_of(value: float, name: str) -> str:
    if not math.isfinite(value):
        return "not finite"
    factor, unit = UNITS.get(shown(name).kind, (1, ""))
    value *= factor
    return (f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}") + unit


def exchanges(run: Run, several: bool) -> Html:
    total = sum(one.seconds for one in run.exchanges) or 1.0
    heads = ["Collective", "Bucket", "Level", "Calls", "Bytes a call", "Time a call", "Share of time"]
    heads += ["Algorithm bandwidth", "Bus bandwidth", "Slowest rank"]
    rows = [
        [
            one.collective, "" if one.bucket is None else one.bucket, one.level, f"{one.calls:,.0f}",
            size(one.bytes / one.calls), *times(one, total),
        ]
        for one in run.exchanges[:100]
    ]  # fmt: skip
    title = f"Collectives of {run.name}" if several else "Collectives, of all ranks and steps"
    more = len(run.exchanges) - len(rows)
    note = tag("small", f"{more} more with less time") if more > 0 else None
    return tag("figure", tag("figcaption", tag("h3", printable(title)), note), table(heads, rows, 3), class_="wide")


def times(one: Exchange, total: float) -> list[Any]:
    """Return the cells that need a time."""
    if not one.timed:
        return ["not timed", "", "", "", ""]
    each = f"{1e3 * one.seconds / one.timed:.3g} ms"
    return [each, f"{one.seconds / total:.1%}", f"{size(one.algbw)}/s", f"{size(one.busbw)}/s", one.slowest]


def table(heads: list[str], rows: list[list[Any]], numeric_from: int = 99, id_: str | None = None) -> Html:
    """Return a table; columns from `numeric_from` on are aligned to the right."""

    def kind(n: int) -> str | None:
        return "n" if n >= numeric_from else None

    head = tag("tr", *(tag("th", text, scope="col", class_=kind(n)) for n, text in enumerate(heads)))
    cells = [tag("tr", *(tag("td", c, class_=kind(n) or "text") for n, c in enumerate(row))) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *cells), id=id_), class_="panel")


def metrics_table(runs: list[Run]) -> Html:
    """Return the last and best value of each metric, for readers who can't see curves."""
    names = [name for name in dict.fromkeys(n for run in runs for n in run.metrics) if name not in CLOCKS]
    heads = ["Metric"] + [text for run in runs for text in (f"{run.name}, last", "best")]
    if len(runs) == 1:
        heads = ["Metric", "Last", "Best"]
    rows = []
    for name in sorted(names):
        row: list[Any] = [tag("span", printable(name), class_="mono")]
        for run in runs:
            metric = run.metrics.get(name)
            best = best_of(run, name) if metric else None
            row += [value_of(metric.last.value, name) if metric else ""]
            row += [f"{value_of(best[0], name)} at {best[1]:,}" if best else ""]
        rows.append(row)
    if not rows:
        return Html()
    body = tag("details", tag("summary", f"Last and best values of {len(rows)} metrics"), table(heads, rows, 1))
    return tag("section", tag("h2", "Numbers"), body, id="numbers")


def tables(runs: list[Run]) -> list[Html]:
    return [made for made in (advice(runs), events(runs), configs(runs)) if made]


def by_run(runs: list[Run], heads: list[str], rows: list[list[Any]]) -> Html:
    """Return a table whose first column names the run, which a single run does not need."""
    first = 0 if len(runs) > 1 else 1
    return table(heads[first:], [row[first:] for row in rows])


def advice(runs: list[Run]) -> Html:
    rows = [
        [
            run.name, f"{item['step']:,}", printable(str(item.get("text") or item["name"]))[:600],
            tag("code", printable(str(item.get("config") or ""))[:300]), f"{item['times']:,}",
        ]
        for run in runs
        for item in run.advice
    ]  # fmt: skip
    heads = ["Run", "Last at step", "Advice", "Try", "Times"]
    return tag("section", tag("h2", "Advice"), by_run(runs, heads, rows), id="advice") if rows else Html()


def events(runs: list[Run]) -> Html:
    rows, left_out = [], 0
    for run in runs:
        by_time = sorted(run.events, key=lambda event: np.nan_to_num(number(event.get("time"))))
        chosen = by_time[-MOST_ROWS // len(runs) :]
        left_out += len(run.events) - len(chosen)
        rows += [[run.name, clock(event), f"{event['step']:,}", event["event"], details(event)] for event in chosen]
    if not rows:
        return Html()
    note = f", the newest; {left_out:,} are left out" if left_out else ""
    listed = by_run(runs, ["Run", "Time (UTC)", "Step", "Event", "Facts"], rows)
    body = tag("details", tag("summary", f"{len(rows):,} events{note}"), listed, open=len(rows) <= 40)
    return tag("section", tag("h2", "Events"), body, id="events")


def clock(event: dict[str, Any]) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(number(event["time"])))
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return ""


def configs(runs: list[Run]) -> Html:
    keys = sorted({key for run in runs for key in run.config})
    if not keys:
        return Html()
    heads, parts = ["Key", *(run.name for run in runs)], []
    if len(runs) > 1:
        different = differences(runs)
        rows = [[tag("code", printable(key)), *map(setting, values)] for key, values in sorted(different.items())]
        parts.append(table(heads, rows) if rows else tag("p", "All runs have the same config."))
    rows = [[tag("code", printable(key)), *(setting(run.config.get(key)) for run in runs)] for key in keys]
    hint = {"placeholder": "Filter keys and values", "aria_label": "Filter", "aria_controls": "keys"}
    search = tag("input", type="search", **hint)
    parts.append(tag("details", tag("summary", f"All {len(keys):,} keys"), search, table(heads, rows, id_="keys")))
    heading = "Config" if len(runs) == 1 else "Config: differences"
    return tag("section", tag("h2", heading), *parts, id="config")


def setting(value: Any) -> Html:
    return tag("code", printable(as_yaml(value))[:500])
