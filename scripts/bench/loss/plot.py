"""Draws curves of a loss over the logarithm of time, as SVG."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 920, 460
LEFT, TOP, RIGHT, BOTTOM = 60, 20, 670, 410  # where the axes are
COLOURS = (
    "#000000", "#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008f9c", "#f032e6", "#808000", "#9a6324",
    "#7d7dff", "#e0a800", "#8a8a8a",
)  # fmt: skip
DASHED = 'stroke="#444" stroke-dasharray="5 4"'


def plot(title: str, lines: Mapping[str, Sequence[tuple[float, float]]], time_s: float, loss: float) -> str:
    """Draw `lines`, which maps names in the legend to seconds and losses; dashed lines mark `time_s` and `loss`."""
    times = [math.log10(t) for t in (time_s, *(t for line in lines.values() for t, _ in line))]
    losses = [each for line in lines.values() for _, each in line]
    first, last = min(times) - 0.02, max(times) + 0.02
    low, high = math.floor(min(losses) * 5) / 5, math.ceil(max(losses) * 5 + 1e-6) / 5

    def x(time: float) -> float:
        return LEFT + (math.log10(time) - first) / (last - first) * (RIGHT - LEFT)

    def y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (BOTTOM - TOP)

    parts = [_line(LEFT, TOP, LEFT, BOTTOM, 'stroke="#444"'), _line(LEFT, BOTTOM, RIGHT, BOTTOM, 'stroke="#444"')]
    for tick in (m * 10.0**e for e in range(-2, 7) for m in (1, 2, 5)):
        if first <= math.log10(tick) <= last:
            parts += [_line(x(tick), TOP, x(tick), BOTTOM), _text(x(tick), BOTTOM + 18, f"{tick:g}", "middle")]
    for tick in (low + i * (high - low) / 5 for i in range(6)):
        parts += [_line(LEFT, y(tick), RIGHT, y(tick)), _text(LEFT - 8, y(tick) + 4, f"{tick:.2f}", "end")]
    parts += [_line(LEFT, y(loss), RIGHT, y(loss), DASHED), _line(x(time_s), TOP, x(time_s), BOTTOM, DASHED)]
    for i, (name, line) in enumerate(lines.items()):
        colour, points = COLOURS[i % len(COLOURS)], " ".join(f"{x(t):.1f},{y(each):.1f}" for t, each in line)
        key = TOP + 8 + 20 * i
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>',
            _line(RIGHT + 16, key, RIGHT + 40, key, f'stroke="{colour}" stroke-width="3"'),
            _text(RIGHT + 48, key + 4, name),
        ]
    parts.append(_text((LEFT + RIGHT) / 2, HEIGHT - 10, "seconds of training", "middle"))
    parts.append(f'<text transform="translate(14 {(TOP + BOTTOM) / 2}) rotate(-90)">validation loss</text>')
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="sans-serif" font-size="12">'
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", background, *parts, "</svg>", ""])


def _line(x1: float, y1: float, x2: float, y2: float, style: str = 'stroke="#ddd"') -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" {style}/>'


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
