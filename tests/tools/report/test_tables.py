"""Values with units, and the page's tables: a reader without curves gets the same numbers."""

import math

from support.run_files import synthetic_run, write_lines

from trainer.tools.report.html import tag
from trainer.tools.report.run import read_run
from trainer.tools.report.tables import clock, exchanges, metrics_table, setting, table, tables, value_of


def test_values_have_units():
    shown = {
        "train/loss": "0.1235", "perf/tokens_per_s": "0.1235", "gpu/utilisation": "12.35 %",
        "host/ram_gib": "0.1235 GiB",
        "time/step": "0.1235 s", "gpu/temperature_c": "0.1235 \N{DEGREE SIGN}C",
    }  # fmt: skip
    assert {name: value_of(0.12345, name) for name in shown} == shown
    assert value_of(123456.7, "perf/tokens_per_s") == "123,457"
    assert value_of(math.nan, "train/loss") == value_of(math.inf, "train/loss") == "not finite"


def test_a_table_escapes_its_cells():
    made = table(["<a>"], [["<b>"], [tag("b", "<c>")]])
    assert "&lt;a&gt;" in made and "&lt;b&gt;" in made and "<b>&lt;c&gt;</b>" in made


def test_tables_of_two_runs(tmp_path):
    runs = [read_run(synthetic_run(tmp_path / name, 40, lr=lr), name, 100) for name, lr in (("a", 1e-3), ("b", 2e-3))]
    advice, events, configs = tables(runs)
    assert "exposed communication is 0.35" in advice and "+callbacks=[overlap]" in advice
    assert events.count('<td class="text">checkpoint</td>') == 8 and "loss not finite" in events
    before, _, after = configs.partition("<details>")
    assert before.count("optimizer.lr") == 1 and "batch" not in before and "batch" in after
    assert "val/accuracy" in metrics_table(runs)
    assert "25 MiB" in exchanges(runs[0], True) and "Collectives of a" in exchanges(runs[0], True)


def test_equal_configs_and_no_tables(tmp_path):
    runs = [read_run(synthetic_run(tmp_path / "a", 40), name, 100) for name in "ab"]
    assert "All runs have the same config." in tables(runs)[-1]
    write_lines(tmp_path / "c" / "metrics.jsonl", [{"step": 1, "train/loss": 1.0}])
    assert tables([read_run(tmp_path / "c", "c", 100)]) == []


def test_times_and_settings():
    assert clock({"time": 0}) == "1970-01-01 00:00:00"
    assert [clock(event) for event in ({}, {"time": "x"}, {"time": 1e300}, {"time": None})] == [""] * 4
    assert [setting(value) for value in (None, True, 1e-3, "a")] == [
        f"<code>{text}</code>" for text in ("null", "true", "0.001", "a")
    ]
