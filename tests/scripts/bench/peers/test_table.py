"""Numbers of made-up steps, and lines counted by hand."""

from pathlib import Path

import pytest

from scripts.bench.harness import Rounds
from scripts.bench.peers.table import lines_of_code, numbers, rows


def test_numbers_of_a_run() -> None:
    """Steps of a second after two of three; the fifth is saved and takes half a second more, the sixth a quarter."""
    ticks = [10.0, 13.0, 14.0, 15.0, 16.5, 17.75, 18.75]
    found = numbers(4.0, ticks, 3 * 2**20, warm=2, save_at=5)
    assert found == pytest.approx({"first_s": 6.0, "step_s": 1.0, "stall_ms": 750.0, "peak_mib": 3.0})


SCRIPT = '''"""The module.

Two paragraphs."""

import os  # counted


class Tick:  # bench
    def on_step_end(self):  # bench
        pass


def call():
    """Do it."""
    # a comment
    return print(
        """text
        of two lines""",
    )
'''


def test_lines_of_a_users_code(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    assert lines_of_code(tmp_path / "script.py") == 7  # import, pass, def, return with three more and its bracket


def test_a_row_compares_within_rounds() -> None:
    def run(step_s: float, **more: float) -> dict[str, float]:
        return {"step_s": step_s, "first_s": 3.0, "stall_ms": 7.0, "peak_mib": 9.0, **more}

    bare = [run(1.0), run(2.0), run(1.0)]
    own = [run(1.25, resume_s=4.0), run(2.5, resume_s=6.0), run(9.0, resume_s=5.0)]
    found = Rounds({"bare loop": [*bare], "Echelon": [*own]}, {"Composer": "not installed: why"})
    base, made, absent = rows("a part", found, {"bare loop": 30, "Echelon": 20, "Composer": "-"})
    assert made["speed, of the bare loop"] == pytest.approx(0.8)
    assert (made["ms a step"], made["resume, s"], made["stall, ms"], made["lines"]) == (2500.0, 5.0, 7.0, 20)
    assert base["resume, s"] == "-" and absent["ms a step"] == "not installed: why"
    assert base.keys() == made.keys() == absent.keys()
