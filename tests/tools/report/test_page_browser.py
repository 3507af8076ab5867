"""The page in a real browser: no error, no request, and curves, crosshair, keys, zoom and themes that work."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import CHROMIUM, Tab, opened
from support.run_files import HOSTILE, hostile_run, long_metrics, synthetic_run, write_lines

from trainer.tools.report.page import make_page
from trainer.tools.report.run import read_run

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium")


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with opened() as tab:
        yield tab


def show(tab: Tab, tmp_path: Path, *folders: Path, width: int = 1400, most: int = 500) -> None:
    file = tmp_path / "page.html"
    file.write_text(make_page([read_run(folder, folder.name, most) for folder in folders]))
    tab.open(file, width)


def all_well(tab: Tab, tmp_path: Path) -> None:
    """Nothing was said on the console, nothing was asked for but the page, and nothing is wider than the window."""
    assert tab.errors == []
    assert set(tab.requests) == {(tmp_path / "page.html").as_uri()}
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")


def inked(tab: Tab, chart: int) -> int:
    """The pixels of a chart that are not empty."""
    return tab.run(
        f"(() => {{ const {{ canvas }} = charts[{chart}], copy = new OffscreenCanvas(canvas.width, canvas.height);"
        "const c = copy.getContext('2d', { willReadFrequently: true }); c.drawImage(canvas, 0, 0);"
        "return c.getImageData(0, 0, copy.width, copy.height).data.filter((v, i) => i % 4 === 3 && v).length })()"
    )


def to_chart(tab: Tab, chart: int) -> tuple[float, float, float, float]:
    """Scroll to it; its left, top, width and height in the window."""
    box = tab.run(
        f"(() => {{ const c = charts[{chart}].canvas; c.scrollIntoView({{block: 'center'}}); "
        "const r = c.getBoundingClientRect(); return [r.x, r.y, r.width, r.height] })()"
    )
    tab.settle()
    tab.settle()
    return tuple(box)


def enter(tab: Tab, selector: str, value: str) -> None:
    """Set a control as a user does."""
    tab.run(
        f"(() => {{ const c = document.querySelector('{selector}'); c.value = '{value}'; "
        "c.dispatchEvent(new Event('input')); c.dispatchEvent(new Event('change')) })()"
    )


@pytest.mark.parametrize("width", [pytest.param(1400, marks=pytest.mark.slow), 700])
def test_everything_is_drawn_in_light_and_dark(tab, tmp_path, width):
    folders = [synthetic_run(tmp_path / name, 60, seed=n, lr=1e-3 / (n + 1)) for n, name in enumerate("ab")]
    show(tab, tmp_path, *folders, width=width)
    grounds = []
    for dark in (False, True):
        tab.paint(dark)
        for chart in range(tab.run("charts.length")):
            to_chart(tab, chart)
            assert inked(tab, chart) > 2000, chart
        grounds.append(tab.run("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(246, 247, 249)", "rgb(14, 17, 21)"]
    assert tab.run("document.querySelectorAll('.ranks .track').length") == 8
    all_well(tab, tmp_path)


def test_a_printed_page_has_all_charts_in_light_colours(tab, tmp_path):
    """Also those that were never on the screen, and the screen is dark."""
    show(tab, tmp_path, *(synthetic_run(tmp_path / name, 60, seed=n) for n, name in enumerate("ab")))
    tab.paint(True)
    tab.run(
        "globalThis.printed = [], addEventListener('beforeprint', () => printed.push("
        "charts.map((chart) => chart.drawn !== undefined && !chart.stale), colour('panel')))"
    )
    assert not all(tab.run("charts.map((chart) => chart.drawn !== undefined)"))
    assert tab.call("Page.printToPDF", printBackground=True)["data"]
    drawn, panel = tab.run("printed")
    assert len(drawn) > 8 and all(drawn) and panel == "#ffffff"
    for chart in range(len(drawn)):
        assert inked(tab, chart) > 2000, chart
    tab.settle()
    assert tab.run("colour('panel')") == "#161a20"  # dark again
    all_well(tab, tmp_path)


@pytest.mark.slow
def test_the_crosshair_has_the_values_of_the_step(tab, tmp_path):
    write_lines(
        tmp_path / "r" / "metrics.jsonl", [{"step": n, "train/loss": n * n, "train/lr": 0.5} for n in range(1, 101)]
    )
    write_lines(tmp_path / "r" / "events.jsonl", [{"step": 50, "event": "skip", "why": "loss not finite"}])
    show(tab, tmp_path, tmp_path / "r")
    x, y, _, height = to_chart(tab, 0)
    tab.mouse("mouseMoved", x + tab.run("charts[0].x(50)"), y + height / 2)
    tab.settle()
    text = tab.run("charts[0].tip.innerText").split()
    assert text == ["step", "50", "train/loss", "2500", "skip:", "loss", "not", "finite"]
    assert tab.run("charts[1].legend.innerText").split() == ["train/lr", "0.5"]
    assert tab.run("charts[0].legend.innerText").split() == ["train/loss", "2500"]
    tab.mouse("mouseMoved", 1, 1)
    tab.settle()
    assert tab.run("charts[0].legend.innerText").split() == ["train/loss", "10000"]
    all_well(tab, tmp_path)


@pytest.mark.slow
def test_dragging_zooms_all_charts_and_a_double_click_shows_all(tab, tmp_path):
    show(tab, tmp_path, synthetic_run(tmp_path / "r", 100, every=1))
    bars = tab.run("document.querySelector('figure[data-ranks] small').textContent")
    x, y, _, height = to_chart(tab, 0)
    left, right = tab.run("[charts[0].x(20), charts[0].x(60)]")
    tab.mouse("mousePressed", x + left, y + height / 2, button="left", clickCount=1)
    tab.mouse("mouseMoved", x + right, y + height / 2, button="left", buttons=1)
    tab.mouse("mouseReleased", x + right, y + height / 2, button="left", clickCount=1)
    tab.settle()
    low, high = tab.run("view.range")
    assert (round(low), round(high)) == (20, 60)
    assert bars == "mean of steps 1 to 100, without validation"
    bars = tab.run("document.querySelector('figure[data-ranks] small').textContent")
    assert re.match("mean of steps (20|21) to (60|61),", bars)
    assert not tab.run("document.getElementById('all').disabled")
    for count in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            tab.mouse(kind, x + left, y + height / 2, button="left", clickCount=count)
    tab.settle()
    assert tab.run("view.range") is None
    all_well(tab, tmp_path)


@pytest.mark.slow
def test_keys(tab, tmp_path):
    write_lines(tmp_path / "r" / "metrics.jsonl", [{"step": n, "train/loss": 10.0**n} for n in range(1, 21)])
    show(tab, tmp_path, tmp_path / "r")
    to_chart(tab, 0)
    tab.run("charts[0].canvas.focus()")
    tab.key("ArrowRight")
    assert tab.run("view.cursor") == 1
    tab.key("ArrowRight")
    tab.key("ArrowRight", modifiers=8)
    assert tab.run("view.cursor") == 12 and "1.00e12" in tab.run("charts[0].tip.innerText")
    tab.key("+")
    low, high = tab.run("view.range")
    assert high - low < 12 and low < 12 < high
    tab.key("0")
    assert tab.run("view.range") is None
    assert "step 12" in tab.run("charts[0].tip.innerText")
    tab.key("l")
    assert tab.run("[charts[0].log, charts[0].button.getAttribute('aria-pressed')]") == [True, "true"]
    tops = tab.run("[5, 10, 15].map((n) => charts[0].y(10 ** n))")
    assert tops[0] - tops[1] == pytest.approx(tops[1] - tops[2])
    tab.key("Escape")
    assert tab.run("view.cursor") is None and tab.run("charts[0].tip.hidden")
    all_well(tab, tmp_path)


@pytest.mark.slow
def test_the_controls(tab, tmp_path):
    folders = [synthetic_run(tmp_path / name, 60, seed=n) for n, name in enumerate("ab")]
    show(tab, tmp_path, *folders)
    enter(tab, "#smooth", "90")
    tab.settle()
    assert tab.run("charts.find((c) => c.title === 'Learning rate').drawn.every(({ raw, y }) => raw === y)")
    raw, smooth = tab.run("[array(charts[0].lines[0].y), charts[0].drawn[0].y].map((a) => Array.from(a))")
    mean, expected = 0.0, []
    for n, value in enumerate(raw, start=1):
        mean = 0.9 * mean + 0.1 * value
        expected.append(mean / (1 - 0.9**n))
    assert (
        smooth == pytest.approx(expected, rel=1e-6) and tab.run("document.getElementById('smoothed').value") == "0.90"
    )
    assert tab.run("charts[0].shown.length") == 4
    tab.run("document.querySelectorAll('button[data-run]')[1].click()")
    tab.settle()
    assert tab.run("charts[0].shown.length") == 2
    assert tab.run("[...document.querySelectorAll('figure[data-ranks]')].map((f) => f.hidden)") == [False, True]
    enter(tab, "#axis", "seconds")
    tab.settle()
    assert tab.run("view.ends[1]") == pytest.approx(60 * 50 * 0.0131, rel=1e-3)
    enter(tab, "input[type=search]", "SEED")
    rows = (
        "[...document.querySelectorAll('#keys tbody tr')].filter((r) => !r.hidden).map((r) => r.cells[0].textContent)"
    )
    assert tab.run(rows) == ["trainer.seed"]
    all_well(tab, tmp_path)


def test_parts_of_a_step(tab, tmp_path):
    """Validation is left out at first; each part can be, and areas of all runs have the same height."""
    folders = [synthetic_run(tmp_path / name, 60, seed=n) for n, name in enumerate("ab")]
    show(tab, tmp_path, *folders)
    chart = tab.run("charts.findIndex((chart) => chart.stack)")
    parts = f"charts[{chart}].shown.map((line) => line.label)"
    said = "document.querySelector('figure[data-ranks] small').textContent"
    assert tab.run(parts)[-1] == "checkpoint" and tab.run(said).endswith(", without validation")
    before = tab.run(f"charts[{chart}].peak()")
    tab.run("[...document.querySelectorAll('.part')].find((b) => b.textContent.startsWith('validation')).click()")
    tab.settle()
    assert tab.run(parts)[-1] == "validation" and "without" not in tab.run(said)
    assert tab.run(f"charts[{chart}].peak()") > before
    for each in (chart, chart + 1):
        to_chart(tab, each)
    heights = tab.run(f"[{chart}, {chart + 1}].map((i) => charts[i].domain()[1])")
    assert heights[0] == heights[1] >= tab.run(f"Math.max(charts[{chart}].peak(), charts[{chart + 1}].peak())")
    all_well(tab, tmp_path)


def test_hostile_texts_are_texts(tab, tmp_path):
    show(tab, tmp_path, hostile_run(tmp_path / "r"), hostile_run(tmp_path / "<img src=x onerror=alert(3)>"))
    for chart in range(tab.run("charts.length")):
        x, y, width, height = to_chart(tab, chart)
        tab.mouse("mouseMoved", x + width / 2, y + height / 2)
        tab.settle()
    assert tab.run("[...document.querySelectorAll('img, script:not([id])')].length") == 1
    assert HOSTILE in tab.run("document.body.textContent")
    all_well(tab, tmp_path)


def test_values_that_are_not_finite_leave_gaps(tab, tmp_path):
    values = [1.0, 2.0, None, None, 2.0, 1.0, None]
    write_lines(tmp_path / "r" / "metrics.jsonl", [{"step": n, "train/loss": v} for n, v in enumerate(values, 1)])
    show(tab, tmp_path, tmp_path / "r")
    to_chart(tab, 0)
    assert tab.run("charts[0].legend.innerText").split() == ["train/loss"]
    assert inked(tab, 0) > 500 and "3 of 7 values are not finite" in tab.run("document.body.textContent")
    all_well(tab, tmp_path)


def test_runs_with_nothing_to_show(tab, tmp_path):
    (tmp_path / "r" / "logs").mkdir(parents=True)
    show(tab, tmp_path, tmp_path / "r")
    assert "metrics.jsonl: is missing" in tab.run("document.body.textContent")
    all_well(tab, tmp_path)


@pytest.mark.slow
def test_a_long_run_is_drawn_and_zoomed(tab, tmp_path):
    long_metrics(tmp_path / "r" / "metrics.jsonl", 40_000)
    show(tab, tmp_path, tmp_path / "r", most=4000)
    to_chart(tab, 0)
    assert inked(tab, 0) > 2000
    tab.run("zoom([13000, 13600])")
    tab.settle()
    assert 30 < tab.run("charts[0].drawn[0].last - charts[0].drawn[0].first") < 80
    all_well(tab, tmp_path)
