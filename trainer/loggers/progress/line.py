"""Describes a moment of a run in one line, and fits the line into the columns of a terminal."""

from datetime import timedelta
from typing import NamedTuple

SHOWN = {
    "train/loss": "loss {:.4g}",
    "train/lr": "lr {:.2e}",
    "perf/samples_per_s": "{:,.0f} samples/s",
    "perf/tokens_per_s": "{:,.0f} tokens/s",
    "perf/mfu": "mfu {:.1%}",
    "perf/peak_memory_gib": "peak {:.1f} GiB",
    "perf/peak_rss_gib": "peak {:.1f} GiB",
}

# Parts of a step that compute nothing, of which the largest is shown.
IDLE = {"data": "data", "upload": "upload", "communication": "communication", "callbacks": "callbacks"}
IDLE |= {"checkpoint": "checkpoint", "validation": "validation"}

# Left out in this order if the terminal is too narrow. What the run does and its step stay.
OPTIONAL = (
    "elapsed", "time/step", "train/lr", "perf/peak_rss_gib", "perf/peak_memory_gib", "perf/mfu", "perf/tokens_per_s",
    "epoch", "perf/samples_per_s", "left", "bar", "percent", "train/loss",
)  # fmt: skip

LEAST_BAR, MOST_BAR = 8, 20  # columns
YEAR = 365 * 24 * 3600  # seconds
MOST = 1000 * YEAR  # a timedelta of more overflows at some point


class Moment(NamedTuple):
    step: int
    last: int | None  # step of the run; None: it has no end
    epoch: str  # "2/10"; empty if the data has no epochs
    doing: str  # between steps: "validating 3/12"; empty in a step
    metrics: dict[str, float]  # of the step whose numbers are the newest
    elapsed_s: float
    left_s: float | None  # None: not known


def describe(metrics: dict[str, float]) -> str:
    return "  ".join([*(form.format(metrics[name]) for name, form in SHOWN.items() if name in metrics), *lost(metrics)])


def lost(metrics: dict[str, float]) -> list[str]:
    """Return the share of the largest part of a step that computes nothing, if it is at least 1 %."""
    whole = metrics.get("time/step", 0.0)
    largest, shown = max((metrics.get(f"time/{name}", 0.0), shown) for name, shown in IDLE.items())
    return [f"{shown} {largest / whole:.0%}"] if largest >= 0.01 * whole > 0 else []


def epoch_of(samples: int, in_epoch: int | None, last: int | None) -> str:
    """Return the epoch of the sample before position `samples`, counted from 1, and the number of epochs.

    `in_epoch` is None for data without epochs; `last`, the run's samples, is None for a run without an end.
    """
    if not in_epoch:
        return ""
    now = max(0, samples - 1) // in_epoch + 1
    return f"{now}/{-(-last // in_epoch)}" if last else str(now)


def clock(seconds: float) -> str:
    if seconds > MOST:
        return f"{seconds / YEAR:.0e} years"
    return str(timedelta(seconds=round(seconds)))


def arrange(moment: Moment, columns: int) -> tuple[str, int, str]:
    """Return the text before the bar, the bar's columns (0: no bar), and the text after it.

    Between steps, what the run is doing replaces the numbers.
    """
    parts = {
        "bar": "" if moment.last is None else " " * LEAST_BAR,
        "percent": f"{100 * moment.step // moment.last}%" if moment.last else "",
        "epoch": moment.epoch and f"epoch {moment.epoch}",
        "elapsed": f"{clock(moment.elapsed_s)} elapsed",
        "left": "" if moment.left_s is None or moment.step == moment.last else f"{clock(moment.left_s)} left",
    }
    metrics = {} if moment.doing else dict(moment.metrics)
    head = f"step {moment.step}" if moment.last is None else f"step {moment.step}/{moment.last}"
    optional = iter(OPTIONAL)
    while True:
        bar, what = parts.get("bar"), moment.doing or describe(metrics)
        texts = (parts.get("percent"), parts.get("epoch"), what, parts.get("elapsed"), parts.get("left"))
        tail = "  ".join(text for text in texts if text)
        room = columns - len(head) - len(tail) - (2 if bar else 1)
        if room >= (LEAST_BAR if bar else 0) or (name := next(optional, None)) is None:
            return head, min(room, MOST_BAR) if bar and room >= LEAST_BAR else 0, tail
        parts.pop(name, None)
        metrics.pop(name, None)
