"""The progress of a run in a notebook: one output that is replaced, with the line, a bar and the curves."""

import itertools
import re
from xml.etree import ElementTree

import pytest

from trainer.loggers.progress import panel as module
from trainer.loggers.progress.line import Moment
from trainer.loggers.progress.panel import POINTS, Panel, chart


class Handle:
    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def update(self, content: dict[str, str], raw: bool) -> None:
        assert raw
        self.shown.append(content)


@pytest.fixture
def handle(monkeypatch) -> Handle:
    ipython = pytest.importorskip("IPython")
    made = Handle()

    def display(content: dict[str, str], raw: bool, display_id: bool) -> Handle:
        made.update(content, raw)
        return made

    monkeypatch.setattr(ipython.display, "display", display)
    monkeypatch.setattr(module.timeouts, "PANEL_S", 0.0)
    return made


def moment(elapsed_s: float, left_s: float | None) -> Moment:
    return Moment(20, 40, "", "", {"train/loss": 2.0}, 60.0, None if left_s is None else 100.0)


def test_one_output_is_replaced(handle):
    panel = Panel(moment, 40, 10)
    for step in range(11, 21):
        panel.note(step, {"train/loss": 30.0 - step, "other": 1.0})
    panel.note(20, {"val/loss": 12.0})
    panel.note(20, {"train/loss": float("nan")})
    panel.advance(20)
    panel.stop(20)
    first, _, last = handle.shown
    assert "left" not in first["text/plain"] and "<svg" not in first["text/html"]
    assert last["text/plain"] == "step 20/40 50%  loss 2  0:01:00 elapsed  0:01:40 left"
    assert '<progress value="20" max="40"' in last["text/html"]
    svg = ElementTree.fromstring(re.search("<svg.*</svg>", last["text/html"])[0])
    assert svg.get("aria-label") == "train/loss 10 at step 20, val/loss 12 at step 20"
    (line, single) = svg.findall("polyline")
    assert len((line.get("points") or "").split()) == 10 and len((single.get("points") or "").split()) == 1
    texts = [each.text for each in svg.findall("text")]
    assert texts == ["19", "10", "step 11", "20", "train/loss 10", "val/loss 12"]


def test_a_long_curve_is_thinned_and_keeps_its_ends(handle):
    panel = Panel(moment, None, 0)
    for step in range(10 * POINTS):
        panel.note(step, {"train/loss": float(step)})
    steps = [step for step, _ in panel.curves["train/loss"]]
    assert POINTS // 2 <= len(steps) <= POINTS and steps[0] == 0
    assert {b - a for a, b in itertools.pairwise(steps)} == {16}  # evenly, also after several halvings
    panel.stop(10 * POINTS)
    assert f"at step {10 * POINTS - 1}" in handle.shown[-1]["text/html"]
    assert "<progress" not in handle.shown[0]["text/html"]


@pytest.mark.parametrize("values", [[], [1.0], [0.0, 0.0], [2.0, 2.0]])
def test_a_curve_without_a_range(values):
    svg = chart({"train/loss": list(enumerate(values))} if values else {})
    assert bool(svg) == (len(values) > 1)
    if svg:
        points = ElementTree.fromstring(svg).find("polyline").get("points")  # pyright: ignore[reportOptionalMemberAccess]
        assert points and "nan" not in points
