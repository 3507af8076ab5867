"""`echelon NAME` runs trainer/tools/NAME: every tool, and a misspelt one is told the nearest."""

import subprocess

import pytest
from support.cli import MAIN, environment, run
from support.quick import quick

from trainer.main import TOOLS, tools


def test_every_module_is_a_tool():
    """A tool is what `python -m` runs: a module with `main`, a package with `__main__`."""
    expected = {path.stem for path in TOOLS.glob("[!_]*.py")} | {
        path.parent.name for path in TOOLS.glob("*/__main__.py")
    }
    assert set(tools()) == expected >= {"compare", "export", "report", "shards"}


@pytest.mark.parametrize("name", quick(["compare", *(name for name in tools() if name != "compare")]))
def test_a_tool_prints_its_own_help(name, tmp_path):
    done = run([name, "--help"], tmp_path)
    assert (done.code, done.err) == (0, "")
    assert f"echelon {name}" in done.out.partition("\n")[0]


def test_help_lists_the_tools(tmp_path):
    done = run(["--help"], tmp_path)
    for name in tools():
        assert any(line.split()[:1] == [name] and len(line) > 40 for line in done.out.splitlines()), name


@pytest.mark.parametrize(
    "word, told",
    [("reprot", "did you mean report"), ("shard", "did you mean shards?"), ("zzz", "there are bench, ")],
)
def test_a_misspelt_word(tmp_path, word, told):
    done = run([word, "runs/a"], tmp_path)
    assert done.code == 78 and done.err.count("\n") == 1
    assert (
        done.err.startswith(f"echelon: {word}: is neither a tool nor KEY=VALUE; {told}") and "; see --help" in done.err
    )


def test_a_word_for_training_is_answered_with_the_command(tmp_path):
    done = run(["train", "recipe=mine.py", "batch=8"], tmp_path)
    line = "echelon: train: leave this word out, because echelon itself trains: echelon recipe=mine.py batch=8\n"
    assert (done.code, done.err) == (78, line)


def test_a_tools_exit_code_and_error_are_its_own(tmp_path):
    command = [*MAIN, "report", "none"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 78
    assert done.stderr == "echelon: RUN=none: is no folder; give the folder of a run, as in runs/NAME\n"


def test_a_setting_is_no_tool(tmp_path):
    done = run(["report=1"], tmp_path)
    assert done.code == 78 and done.err.startswith("echelon: report=1: no such key")
