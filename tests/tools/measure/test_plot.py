"""The plot is a PNG with a panel for each level; the dashed lines are the fits."""

from pathlib import Path
from typing import Any

import pytest
from support.needs import needs

from trainer.tools.measure import plot

pytestmark = needs("matplotlib")
FIT = {"latency_s": 1e-4, "bytes_per_s": 1e7, "cpu_s_per_byte": 0.0}
ROW = {"collective": "all_reduce", "seconds": 1e-3, "algbw": 1e6, "cpu_seconds": 0.0}


def report(levels: list[str]) -> dict[str, Any]:
    own = [{"level": level, "collective": "all_reduce"} for level in levels]
    rows = [{**ROW, **each, "bytes": size, "busbw": size * 1e3, "ranks": 2} for each in own for size in (1000, 9000)]
    return {"about": "2 rank(s)", "collectives": rows, "fits": [{**FIT, **each} for each in own]}


@pytest.mark.parametrize("levels", [[], ["inside"], ["inside", "across", "all"]])
def test_a_png_has_a_panel_for_each_level(levels: list[str], tmp_path: Path) -> None:
    plot.draw(report(levels), tmp_path / "b.png")
    content = (tmp_path / "b.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width = int.from_bytes(content[16:20], "big")
    assert width == 720 * max(1, len(levels))


def test_the_fit_is_the_time_by_latency_and_rate() -> None:
    row = {"collective": "all_reduce", "bytes": 10_000, "ranks": 2}
    assert plot.fitted(FIT, row) == pytest.approx(10_000 / (2e-4 + 1e-3))
    assert plot.fitted({**FIT, "bytes_per_s": None}, row) == pytest.approx(10_000 / 2e-4)
