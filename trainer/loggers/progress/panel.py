"""Draws the progress of a run in a notebook: a bar, the line of numbers, and the curves of the losses."""

import math
import time
from collections.abc import Callable
from html import escape

from trainer import timeouts
from trainer.loggers.progress.line import Moment, arrange

COLUMNS = 200  # characters of the line, which a notebook wraps
POINTS = 400  # of a curve, at most
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 180, 56, 20  # of the chart, in pixels
CURVES = {"train/loss": "#0b7dc2", "val/loss": "#d06000"}  # name -> colour, readable on white and on black

Curve = list[tuple[int, float]]


class Panel:
    """Replaces its output of the cell as the run goes. It has no thread, so the display is that of the last update.

    Args:
        look: Returns the present moment, from the seconds since the start and those that are left.
        last: The last step; None: the run has no end.
        step: The step at which this process begins.
    """

    console = None  # log lines follow in the cell

    def __init__(self, look: Callable[[float, float | None], Moment], last: int | None, step: int) -> None:
        from IPython.display import display

        self.look, self.last, self.first = look, last, step
        self.began = self.drawn_at = time.monotonic()
        self.curves: dict[str, Curve] = {name: [] for name in CURVES}
        self.newest: dict[str, tuple[int, float]] = {}
        self.seen, self.stride = dict.fromkeys(CURVES, 0), dict.fromkeys(CURVES, 1)
        self.handle = display(self._drawn(step), raw=True, display_id=True)

    def note(self, step: int, numbers: dict[str, float]) -> None:
        """Add the numbers to the curves. A full curve keeps every second point, and from then on takes half as many."""
        for name, curve in self.curves.items():
            if not math.isfinite(numbers.get(name, math.nan)):
                continue
            self.newest[name] = step, numbers[name]
            if self.seen[name] % self.stride[name] == 0:
                curve.append(self.newest[name])
            self.seen[name] += 1
            if len(curve) > POINTS:
                del curve[1::2]
                self.stride[name] *= 2

    def advance(self, step: int) -> None:
        if time.monotonic() - self.drawn_at > timeouts.PANEL_S:
            self.redraw(step)

    def redraw(self, step: int) -> None:
        self.drawn_at = time.monotonic()
        if self.handle is not None:  # None: no kernel listens
            self.handle.update(self._drawn(step), raw=True)

    def stop(self, step: int) -> None:
        self.redraw(step)

    def _drawn(self, step: int) -> dict[str, str]:
        elapsed = time.monotonic() - self.began
        done = step - self.first
        left = elapsed / done * (self.last - step) if done and self.last is not None else None
        head, _, tail = arrange(self.look(elapsed, left), COLUMNS)
        line = f"{head} {tail}"
        bar = f'<progress value="{step}" max="{self.last}" style="width: 100%"></progress>' if self.last else ""
        curves = {name: [*curve, *self._end(name)] for name, curve in self.curves.items() if curve}
        html = f'<div style="max-width: {WIDTH}px">{bar}<div>{escape(line)}</div>{chart(curves)}</div>'
        return {"text/plain": line, "text/html": html}

    def _end(self, name: str) -> Curve:
        """Return the newest point, unless the curve has it."""
        return [self.newest[name]] if self.newest[name] != self.curves[name][-1] else []


def chart(curves: dict[str, Curve]) -> str:
    """Return an SVG of the curves; empty until one of them has two points."""
    points = [point for curve in curves.values() for point in curve]
    first, last = min((step for step, _ in points), default=0), max((step for step, _ in points), default=0)
    if first == last:
        return ""
    low, high = min(value for _, value in points), max(value for _, value in points)
    span = high - low or abs(high) or 1.0

    def place(step: int, value: float) -> str:
        x = LEFT + (step - first) / (last - first) * (WIDTH - LEFT - 8)
        return f"{x:.1f},{8 + (high - value) / span * (HEIGHT - BOTTOM - 16):.1f}"

    parts = []
    for n, (name, curve) in enumerate(curves.items()):
        colour = CURVES[name]
        parts.append(text(WIDTH - 8 - 120 * (len(curves) - 1 - n), 16, "end", f"{name} {curve[-1][1]:.4g}", colour))
        line = " ".join(place(*point) for point in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.75"/>')
        x, y = place(*curve[-1]).split(",")
        parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
    axes = f'<path d="M{LEFT},4 V{HEIGHT - BOTTOM} H{WIDTH}" fill="none" stroke="currentColor" opacity="0.4"/>'
    ends = [text(LEFT - 6, 14, "end", f"{high:.4g}"), text(LEFT - 6, HEIGHT - BOTTOM - 6, "end", f"{low:.4g}")]
    ends += [text(LEFT, HEIGHT - 6, "start", f"step {first:,}"), text(WIDTH, HEIGHT - 6, "end", f"{last:,}")]
    label = ", ".join(f"{name} {curve[-1][1]:.4g} at step {curve[-1][0]}" for name, curve in curves.items())
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" style="max-width: 100%; height: auto"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{axes}{"".join([*ends, *parts])}</svg>'


def text(x: float, y: float, anchor: str, words: str, colour: str = "currentColor") -> str:
    style = f"font: 11px sans-serif; fill: {colour}"
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" style="{style}">{escape(words)}</text>'
