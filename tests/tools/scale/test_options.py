"""Words of the command, and the command itself in a process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.messages import refuses

from trainer.errors import ConfigError
from trainer.tools.scale.__main__ import command
from trainer.tools.scale.options import counts, read


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4", (4,)), ("1,2,2,8", (1, 2, 8)), ("1..8", (1, 2, 4, 8)), ("3..10", (3, 6, 10)), ("5..5", (5,))],
)
def test_numbers_of_nodes(text: str, expected: tuple[int, ...]) -> None:
    assert counts(text) == expected


def test_other_words_are_the_run_s() -> None:
    options, rest = read(["nodes=1..4", "recipe=bert_base", "mfu=0.5", "ways=ring,tree", "+callbacks=[ema]", "nodes"])
    assert options.nodes == (1, 2, 4) and options.mfu == 0.5 and options.ways == ("ring", "tree")
    assert rest == ["recipe=bert_base", "+callbacks=[ema]", "nodes"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("nodes=0", "nodes=0: is no list"),
        ("nodes=8..1", "nodes=8..1: is no list"),
        ("nodes=", "nodes=: is no list"),
        ("nodes=1..999999", "from 1 to 131072"),
        ("mfu=0", "mfu=0.0: must be more than 0"),
        ("mfu=nan", "mfu=nan: must be more than 0"),
        ("mfu=2", "must be at most 1"),
        ("per_rank=x", "per_rank=x: is not a whole number"),
        ("flops=-1", "flops=-1.0: must be at least 0"),
        ("ways=rings", "ways=rings: rings is unknown; did you mean ring"),
        ("ways=", "ways=: names none"),
        ("scaling=big", "scaling=big: must be weak or strong"),
    ],
)
def test_nonsense_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read([word])
    assert message in str(error.value)


def test_a_folder_is_no_file_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["scale", "--json", "."])
    with refuses("--json=.", "folder"):
        command()


def test_without_matplotlib_a_png_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["scale", "--png", "a.png"])
    with refuses("--png", "matplotlib"):
        command()


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer.tools.scale", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_the_command_predicts_shows_and_writes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["recipe=bert_base", "nodes=1..4", "ways=ring,shard-3,pipeline-4", "--json", "rows.json"]
    pytest.importorskip("matplotlib")
    done = run(*words, "--png", "rows.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "bert_base: 109,5" in done.stdout
        and "| nodes |" in done.stdout
        and "memory: without activations" in done.stdout
    )
    found = json.loads((tmp_path / "rows.json").read_text())
    assert [row["way"] for row in found["rows"]] == ["ring", "shard-3", "pipeline-4"] * 3 and found["left_out"] == []
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_callbacks_that_do_not_compose_are_refused(tmp_path: Path) -> None:
    done = run("nodes=2", "+callbacks=[ema,local_sgd]", cwd=tmp_path)
    assert done.returncode == 78 and "leave the average out" in done.stderr


@pytest.mark.slow
def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    done = run("nodes=2", "machine=nowhere", cwd=tmp_path)
    assert done.returncode == 78 and len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("echelon: machine=nowhere: is no file and no preset")
