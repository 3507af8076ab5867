"""The page loads nothing, runs nothing of a stranger's, and shows each run as far as it can be had."""

import base64
import hashlib
import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.cli import environment
from support.run_files import HOSTILE, hostile_run, long_metrics, synthetic_run, write_lines

from trainer.tools.report.__main__ import report
from trainer.tools.report.names import SECTIONS
from trainer.tools.report.page import ASSETS, duration, make_page
from trainer.tools.report.run import read_run


class Elements(HTMLParser):
    """The names of all elements and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.attributes = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


def test_no_text_of_a_run_becomes_html(tmp_path):
    """In the name of the run, of metrics and keys, in values, errors, events, advice and collectives."""
    folder = hostile_run(tmp_path / "run<img src=x onerror=alert(3)>")
    runs = [read_run(folder, folder.name, 100), read_run(folder, HOSTILE, 100)]
    page = make_page(runs)
    elements = Elements(page)
    assert elements.tags.count("script") == 2 and not {"img", "iframe", "object", "link"} & set(elements.tags)
    assert not [name for name in elements.attributes if name.startswith("on") or name in ("src", "style")]
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page)
    assert data and json.loads(data[1])["runs"][1]["name"] == HOSTILE


def test_the_policy_allows_the_pages_own_script_and_style_alone(tmp_path):
    page = make_page([read_run(synthetic_run(tmp_path / "r", 20), "r", 100)])
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    script = page[page.rindex("<script>") + 8 : page.rindex("</script>")]
    style = page[page.index("<style>") + 7 : page.index("</style>")]
    for kind, text in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src &#x27;sha256-{digest}&#x27;" in policy[1]
    assert "default-src &#x27;none&#x27;" in policy[1] and "unsafe" not in policy[1]
    assert not re.search(r'(src|href)="(?!#)|https?://|url\(|@import', page)


def test_scripts_write_text_only():
    for file in ASSETS.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|fetch\(|XMLHttp", file.read_text()
        )


def test_a_page_of_everything(tmp_path):
    runs = [read_run(synthetic_run(tmp_path / name, 60, seed=n), name, 500) for n, name in enumerate("ab")]
    page = make_page(runs)
    for heading in list(SECTIONS.values())[:-1]:
        assert f"<h2>{heading}</h2>" in page
    for text in ("Ranks of a", "Collectives of b", "Config: differences", "Advice", "NVIDIA H100 80GB HBM3"):
        assert text in page
    assert page.count("data-ranks=") == 2


@pytest.mark.parametrize("lines", [0, 1, 2])
def test_a_run_of_few_lines(tmp_path, lines):
    write_lines(tmp_path / "metrics.jsonl", [{"step": n, "train/loss": None} for n in range(lines)])
    page = make_page([read_run(tmp_path, "r", 100)])
    assert "running or killed" in page and "config.yaml: is missing" in page


def test_the_command_writes_where_it_says(tmp_path, capsys):
    folders = [synthetic_run(tmp_path / name, 20) for name in "ab"]
    assert report(folders[:1], None, False) == 0 and (tmp_path / "a" / "report.html").exists()
    assert report(folders, None, False) == 0 and (tmp_path / "report.html").exists()
    assert report(folders, Path("x/y.html"), False) == 0 and (tmp_path / "x" / "y.html").exists()
    assert re.search(r"^x/y\.html: 0\.\d MB in \d+\.\d s$", capsys.readouterr().out, re.MULTILINE)


def test_durations():
    shown = {
        5: "5 s",
        0.01234: "0.0123 s",
        61: "1 min 1 s",
        7322: "2 h 2 min",
        200_000: "2 d 7 h",
        float("nan"): "unknown",
    }
    assert [duration(seconds) for seconds in shown] == list(shown.values())


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_have_contrast_in_light_and_dark():
    """WCAG 2.2: 4.5 for text, 3 for curves and areas (1.4.3, 1.4.11)."""
    light, dark = re.findall(r":root(?::not\(.printing\))? \{(.*?)\}", (ASSETS / "page.css").read_text(), re.DOTALL)
    for theme in (light, dark):
        colours = dict(re.findall(r"--([\w-]+): (#\w{6});", theme))
        for ground in ("panel", "ground"):
            other = luminance(colours[ground])
            ratios = {}
            for name, colour in colours.items():
                low, high = sorted((luminance(colour), other))
                ratios[name] = (high + 0.05) / (low + 0.05)
            texts = ("text", "muted", "accent", "good", "bad", "warn")
            assert not {name: ratio for name, ratio in ratios.items() if name in texts and ratio < 4.5}
            drawn = [name for name in ratios if name not in ("ground", "panel", "line", "grid", "tint")]
            assert len(drawn) >= 24 and not {name: ratios[name] for name in drawn if ratios[name] < 3}


PEAK = """
from pathlib import Path
from trainer.tools.report.__main__ import report
assert report([Path("r")], None, False) == 0
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])  # KiB: the process's largest ever
"""


@pytest.mark.slow
def test_a_million_steps(tmp_path):
    long_metrics(tmp_path / "r" / "metrics.jsonl", 1_000_000)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PEAK], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    seconds, peak = time.monotonic() - began, int(done.stdout.split()[-1]) << 10
    read, size = ((tmp_path / "r" / name).stat().st_size for name in ("metrics.jsonl", "report.html"))
    print(
        f"1,000,000 lines: {seconds:.1f} s, {size / 1e6:.2f} MB, {peak / 1e6:.0f} MB of memory for {read / 1e6:.0f} MB"
    )
    assert size < 3e6 and peak < 1.5e8 < read
