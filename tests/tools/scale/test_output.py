"""The table, the JSON and the picture of rows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.errors import ConfigError
from trainer.tools.scale.__main__ import command
from trainer.tools.scale.output import COLUMNS, PARTS, duration, plot, table, write_json
from trainer.tools.scale.rows import Row

ROW = Row(2, 16, "ring", 64, 0.5, 128.0, 0.9, 0.1, 3.25, True, 2.0, 0.2, 81.0, 90.0, 0.01, 126.7, ())


def test_a_table_has_a_cell_for_each_column_and_marks_what_does_not_fit() -> None:
    head, rule, *lines = table([ROW, replace(ROW, fits=False, ranks=1024)]).splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == list(COLUMNS) and set(rule) == set("|- ")
    assert len({len(line) for line in (head, rule, *lines)}) == 1
    assert "3.2 !" in lines[1] and "3.2 !" not in lines[0] and "500.0" in lines[0] and "90.0 s" in lines[0]


@pytest.mark.parametrize(("seconds", "text"), [(90, "90.0 s"), (600, "10.0 min"), (9000, "2.5 h")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_json(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"recipe": "x"}, [ROW], ["y"])
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["recipe"] == "x" and found["left_out"] == ["y"] and found["rows"][0]["step_s"] == 0.5
    with pytest.raises(ConfigError, match="No such file or directory; name a file"):
        write_json(tmp_path / "missing" / "a.json", {}, [ROW], [])


def test_what_the_optimizer_leaves_out_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # `compose` sets it
    monkeypatch.setattr("sys.argv", ["scale", "recipe=gpt2_tiny", "optimizer=sgd"])
    monkeypatch.setattr("trainer.tools.scale.__main__.scale", lambda *_: None)
    assert command() == 0
    assert "warning: optimizer.betas=[0.9, 0.95]: the recipe's YAML sets this" in capsys.readouterr().out


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(tmp_path / "a.png", "a\ntitle", [ROW, replace(ROW, ranks=32), replace(ROW, way="tree")])
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_a_picture_has_what_the_table_has() -> None:
    assert {name for name, _ in PARTS} == {
        "samples_per_s", "efficiency", "exposed", "memory_gib", "checkpoint_s", "mtbf_h"
    }  # fmt: skip
