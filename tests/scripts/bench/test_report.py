"""The options, goals and files of a bench."""

import importlib
import json
from pathlib import Path

import pytest

import scripts.bench
from scripts.bench.report import at_least, at_most, median_ratio, parser, report


@pytest.mark.parametrize(("value", "met"), [(1.1, True), (1.11, False)])
def test_a_goal_is_met_or_missed(value: float, met: bool, capsys, tmp_path) -> None:
    rows = [{"part": "a table", "loop": "bare", "ratio": 1.0}]
    report([rows], [at_most("a ratio", 1.1, value)], {"cpu": "x"}, tmp_path / "out.json")
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"- a ratio: at most 1.1, measured {value}, {'met' if met else 'missed'}"
    goal = {"name": "a ratio", "goal": "at most 1.1", "value": value, "met": met}
    assert json.loads((tmp_path / "out.json").read_text()) == {"machine": {"cpu": "x"}, "rows": rows, "goals": [goal]}


def test_a_lower_bound_is_met_or_missed() -> None:
    assert [at_least("a speed", 0.9, value).met for value in (0.89, 0.9, 1.0)] == [False, True, True]


def test_a_ratio_is_within_a_round() -> None:
    """The second round is ten times as slow for both."""
    assert median_ratio([2.0, 30.0, 2.0], [1.0, 10.0, 1.0]) == 2.0


def test_help_is_the_docstring_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parser("codecs", "Measures this.\n\n    On that.\n", "a minute", "5").parse_args(["--help"])
    printed = capsys.readouterr().out
    assert printed.startswith("usage: python -m scripts.bench.codecs [-h] [--quick]")
    assert "\nMeasures this.\n\n    On that.\n" in printed


BENCHES = [
    ".".join(path.relative_to(path.parents[i]).with_suffix("").parts)
    for i, pattern in ((1, "*.py"), (2, "*/__main__.py"))
    for path in sorted(Path(scripts.bench.__file__).parent.glob(pattern))
    if "\ndef main(" in path.read_text()
]


@pytest.mark.parametrize("name", BENCHES)
def test_each_bench_has_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(f"scripts.{name}").main()
    assert capsys.readouterr().out.startswith(f"usage: python -m scripts.{name.removesuffix('.__main__')} ")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--rounds", "0"], "argument --rounds: 0: give a whole number, 1 or more"),
        (["--json", "none/out.json"], "argument --json: none/out.json: none is no folder that you may write to"),
        (["--json", "."], "argument --json: .: is a folder; name a file"),
    ],
)
def test_a_wrong_option_is_told_before_anything_is_measured(
    words: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        parser("codecs", "", "", "").parse_args(words)
    assert error in capsys.readouterr().err.splitlines()[-1]
