"""The options, goals and files of a bench."""

import importlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import scripts.bench
from scripts.bench.harness import (
    MARK,
    Failed,
    Record,
    Report,
    Rounds,
    alone,
    at_least,
    at_most,
    median_ratio,
    on_ranks,
    parser,
    write_page,
)  # fmt: skip
from trainer.errors import ConfigError
from trainer.process.environment import Place


@pytest.mark.parametrize(("value", "met"), [(1.1, True), (1.11, False)])
def test_a_goal_is_met_or_missed(value: float, met: bool, capsys, tmp_path) -> None:
    rows = [{"part": "a table", "loop": "bare", "ratio": 1.0}]
    with pytest.raises(KeyboardInterrupt), Report(tmp_path / "out.json", None) as made:
        made.add(rows, [at_most("a ratio", 1.1, value)])
        raise KeyboardInterrupt  # a bench that is stopped has its tables, too
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"- a ratio: at most 1.1, measured {value}, {'met' if met else 'missed'}"
    goal = {"name": "a ratio", "goal": "at most 1.1", "value": value, "met": met}
    assert json.loads((tmp_path / "out.json").read_text()) == {"machine": {}, "rows": rows, "goals": [goal]}


def test_turns_are_reversed_after_each_round_and_a_failure_costs_no_other(capsys) -> None:
    asked = []

    def take(name: str) -> dict[str, float]:
        asked.append(name)
        if asked.count("b") == 2 and name == "b":
            raise Failed("why")
        return {"seconds": float(len(asked))}

    found = Rounds.of("abc").run(3, take, "here, ")
    assert asked == [*"abc", *"cba", *"ac"] and found.failed == {"b": "why"}
    assert found.values("a") == [1.0, 6.0, 7.0] and found.median("c") == 4.0 and found.ratio("a", "c") == 7 / 8
    assert found.table("t", "row", {"s": found.median})[0] == {"part": "t", "row": "a", "s": 6.0}
    assert "here, round 2/3: b: failed: why\n" in capsys.readouterr().err


def ranks(place: Place, more: int) -> tuple[int, int, str]:
    print("not seen")
    return place.rank, place.world + more, os.path.basename(os.path.dirname(place.store))


def test_ranks_share_a_folder_that_is_gone_afterwards(tmp_path: Path, capfd) -> None:
    found = on_ranks(2, ranks, 10)
    assert [each[:2] for each in found] == [(0, 12), (1, 12)] and found[0][2] == found[1][2]
    assert not list(tmp_path.iterdir()) and "not seen" not in capfd.readouterr().out


def answer(how: str) -> str:
    subprocess.Popen(["sleep", "60"])
    if how == "failed":
        raise Failed("why")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "late":
        time.sleep(60)
    return how


def test_a_process_of_its_own_answers_or_fails() -> None:
    assert alone(answer, "well") == "well"
    for how, reason in (("failed", "^why$"), ("killed", "ended with code -9"), ("late", "no result in 0 s")):
        with pytest.raises(Failed, match=reason):
            alone(answer, how, limit_s=0.3)


def test_a_page_keeps_what_is_around_the_marks(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    write_page(file, "first\n")
    file.write_text(f"A head.\n\n{file.read_text().removeprefix('# page').lstrip()}A foot.\n")
    write_page(file, "second\n")
    assert file.read_text() == f"A head.\n\n{MARK}second\n{MARK}A foot.\n"


def test_a_record_of_other_settings_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    record = Record(file, {"rate": "1gbit"}, rounds=[])
    record["rounds"].append(1)
    record.write()
    assert Record(file, {"rate": "1gbit"}, rounds=[])["rounds"] == [1]
    with pytest.raises(ConfigError, match=r"^--json .*: is of .*1gbit.*, not of .*2gbit.*; name another file"):
        Record(file, {"rate": "2gbit"}, rounds=[])


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
    words: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser("codecs", "", "quick", "rounds").parse_args(words)
    assert error in capsys.readouterr().err.splitlines()[-1]
