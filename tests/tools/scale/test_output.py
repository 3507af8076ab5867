"""The table, the JSON and the picture of rows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.costs import WORKLOAD

from trainer.errors import ConfigError
from trainer.tools.scale.__main__ import command, scale
from trainer.tools.scale.machines import PRESETS
from trainer.tools.scale.options import ScaleOptions
from trainer.tools.scale.output import COLUMNS, duration, plot, table, write_json
from trainer.tools.scale.rows import Row
from trainer.tools.scale.work import Work

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


def test_the_json_has_the_precision_and_what_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = Work(WORKLOAD, "fp16", 0.0, ("optimizer: x",))
    monkeypatch.setattr("trainer.tools.scale.work.count", lambda *_: counted)
    monkeypatch.setattr(
        "trainer.tools.scale.__main__.find", lambda _: replace(PRESETS["8xv100-1x100g"], unknown=("checkpoints: y",))
    )
    of_trainer: dict[str, Any] = {"allow_targets": [], "ddp": {}}
    config: dict[str, Any] = {"batch": 8, "micro_batch": 1, "callbacks": {}, "trainer": of_trainer}
    scale(ScaleOptions(nodes=(1,), ways=("ring",)), config, "r", None, tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text())
    assert (found["precision"], found["unknown"]) == ("fp16", ["checkpoints: y", "optimizer: x"])
    assert capsys.readouterr().out.endswith("\ncheckpoints: y\noptimizer: x\n")


def test_what_the_optimizer_leaves_out_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # `compose` sets it
    monkeypatch.setattr("sys.argv", ["scale", "recipe=gpt2_tiny", "optimizer=sgd"])
    monkeypatch.setattr("trainer.tools.scale.__main__.scale", lambda *_: None)
    assert command() == 0
    assert "warning: optimizer.betas=[0.9, 0.95]: the recipe's YAML sets this" in capsys.readouterr().out


def test_a_picture_has_a_part_for_each_of_some_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    made = list[Any]()
    monkeypatch.setattr("matplotlib.figure.Figure", lambda **given: made.append(figure(**given)) or made[-1])
    plot(tmp_path / "a.png", "a\ntitle", [ROW, replace(ROW, ranks=32), replace(ROW, way="tree")])
    assert (tmp_path / "a.png").stat().st_size > 5000
    drawn = {axes.get_ylabel(): list(axes.get_lines()[0].get_ydata()) for axes in made[0].axes}
    assert drawn == {
        "samples a second": [128.0] * 2, "of a lone rank's speed": [0.9] * 2, "of the step, waiting": [0.1] * 2,
        "GiB": [3.25] * 2, "seconds of a checkpoint": [2.0] * 2, "hours between failures": [81.0] * 2,
    }  # fmt: skip
