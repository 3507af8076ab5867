"""Tables and goals of given numbers."""

from dataclasses import replace

import pytest

from scripts.bench.one_gpu.cells import Cell
from scripts.bench.one_gpu.table import Measured, goals, tables


def speed(trainer: str, tokens: float, mfu: float | None = None, **more: object) -> tuple[Cell, dict[str, float]]:
    cell = replace(Cell("speed", trainer), **more)
    return cell, {
        "ms a step": 1e6 / tokens,
        "tokens/s": tokens,
        "peak GiB": 1.0,
        **({} if mfu is None else {"MFU": mfu}),
    }


def test_goals_take_each_trainers_best_setting_on_long_sequences() -> None:
    measured: Measured = dict([
        speed("Echelon", 900.0, 0.3),
        speed("Echelon", 1300.0, 0.5, compiled="blocks", precision="bf16_params"),
        speed("Echelon", 9999.0, 0.9, sequence=128),
        speed("Echelon", 8888.0, 0.8, documents=True),
        speed("bare loop", 910.0),
        speed("Hugging Face Trainer", 800.0),
        speed("Hugging Face Trainer", 1000.0, compiled="whole"),
        speed("Lightning", 990.0, compiled="whole"),
    ])  # fmt: skip
    found = {goal.goal: (goal.value, goal.met) for goal in goals(measured)}
    assert found["at least 1.15"] == (pytest.approx(1.3), True)
    assert found["at least 0.55"] == (0.5, False)
    assert found["at most 1.02"] == (pytest.approx(910 / 900), True)


def test_a_goal_without_its_numbers_is_left_out() -> None:
    assert goals({}) == []
    assert goals(dict([speed("Echelon", 900.0), speed("Lightning", 1.0)])) == []  # one peer, no MFU, no bare loop


def test_each_part_has_a_table_with_the_same_columns() -> None:
    measured: Measured = {
        **dict([speed("Echelon", 900.0, 0.3), speed("bare loop", 910.0)]),
        Cell("launches", "Echelon"): {"ms a step": 6.0},
        Cell("launches", "bare loop"): {"ms a step": 5.0},
        Cell("snapshot", "Echelon"): {"ms a step": 6.0, "stall, ms": 20.0},
        Cell("kernels", "Echelon"): {"attention": 1.0, "matrix products": 3.0},
    }
    made = tables(measured)
    assert len(made) == 4 and all(len({tuple(row) for row in rows}) == 1 for rows in made)
    assert [row["MFU"] for row in made[0]] == [0.3, "unknown"]
    assert [row["ratio"] for row in made[1]] == [pytest.approx(1.2), 1.0]
    assert [(row["kernels"], row["share"]) for row in made[3]] == [("matrix products", 0.75), ("attention", 0.25)]


def test_launches_without_a_bare_loop_have_no_ratio() -> None:
    (rows,) = tables({Cell("launches", "Echelon"): {"ms a step": 6.0}})
    assert rows[0]["ratio"] == "unknown"
