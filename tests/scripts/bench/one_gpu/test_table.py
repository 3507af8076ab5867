"""Tables and goals of given numbers."""

from dataclasses import replace

import pytest

from scripts.bench.one_gpu.cells import NARROW, Cell, ladder
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
        (Cell("turns", size=NARROW), {"ratio": 1.2}),
        (Cell("turns"), {"ratio": 1.01}),
    ])  # fmt: skip
    found = {goal.goal: (goal.value, goal.met) for goal in goals(measured)}
    assert found["at least 1.5"] == (pytest.approx(1.3), False)
    assert found["at least 0.55"] == (0.5, False)
    assert found["at most 1.02"] == (1.01, True)


def test_a_goal_without_its_numbers_is_left_out() -> None:
    assert goals({}) == []
    assert goals(dict([speed("Echelon", 900.0), speed("Lightning", 1.0)])) == []  # one peer, no MFU, no turns


def test_each_kind_has_a_table_with_the_same_columns() -> None:
    measured: Measured = {
        Cell("tests", "the tests"): {"passed": 3.0, "skipped": 0.0},
        Cell("turns"): {"bare loop, ms a step": 5.0, "Echelon, ms a step": 6.0, "ratio": 1.2, "noise": 1.0},
        **dict([speed("Echelon", 900.0, 0.3), speed("bare loop", 910.0)]),
        Cell("snapshot"): {"ms a step": 6.0, "stall, ms": 20.0},
        Cell("kernels"): {"attention": 1.0, "matrix products": 3.0},
        Cell("images"): {"images/s": 9.0, "GB/s": 0.1, "side": 224.0, "workers": 8.0},
        Cell("images", "bare loop"): {"images/s": 8.0, "GB/s": 0.1, "side": 224.0, "workers": 8.0},
    }
    made = tables(measured)
    assert len(made) == 6 and all(len({tuple(row) for row in rows}) == 1 for rows in made)
    assert made[0][0]["passed"] == 3 and made[1][0]["ratio"] == 1.2
    assert [row["MFU"] for row in made[2]] == [0.3, "unknown"]
    assert [(row["kernels"], row["share"]) for row in made[3]] == [("matrix products", 0.75), ("attention", 0.25)]
    assert [row["side"] for row in made[5]] == [224, 224]


def test_a_rung_shows_what_it_adds() -> None:
    eager, blocks, best, *_ = rungs = ladder(64)
    numbers = {"ms a step": 1.0, "tokens/s": 100.0, "MFU": 0.3}
    measured: Measured = {eager.cell: numbers, best.cell: {**numbers, "tokens/s": 150.0, "MFU": 0.45}}
    *_, rows = tables(measured, rungs)
    assert [(row["rung"], row["MFU added"], row["times tokens/s"]) for row in rows] == [
        (eager.name, "unknown", "unknown"), (best.name, "unknown", "unknown"),
    ]  # fmt: skip
    *_, rows = tables({**measured, blocks.cell: {**numbers, "MFU": 0.4}}, rungs)
    assert rows[2]["MFU added"] == pytest.approx(0.05) and rows[2]["times tokens/s"] == 1.5
