"""The processes start, and their imports are counted."""

import pytest

from scripts.bench.overhead.start_up import imports, start_up

pytestmark = pytest.mark.slow


def test_each_process_reaches_its_first_step() -> None:
    shown, bare, first = start_up(1)
    assert 0 < shown["seconds"] < bare["seconds"] and first["seconds"] > 0 and bare["ratio"] == 1


def test_the_imports_of_a_first_step_are_listed_by_package() -> None:
    rows = {row["package"]: row for row in imports()}
    assert {"torch", "trainer", "numpy", "all"} <= rows.keys() and 100 < rows["trainer"]["modules"] <= 210
    assert rows["all"]["modules"] > sum(row["modules"] for name, row in rows.items() if name != "all") > 0
