"""`echelon NAME` runs trainer/tools/NAME: every tool, and a misspelt one is told the nearest."""

import subprocess

import pytest
from support.cli import MAIN, environment, run

from trainer.main import TOOLS, tools


@pytest.mark.slow
def test_every_tool_is_reachable(tmp_path):
    """Each prints its own help. A tool is what `python -m` runs: a module with `main`, a package with `__main__`."""
    expected = {path.stem for path in TOOLS.glob("[!_]*.py")} | {
        path.parent.name for path in TOOLS.glob("*/__main__.py")
    }
    assert set(tools()) == expected >= {"compare", "export", "report", "shards"}
    for name in tools():
        done = run([name, "--help"], tmp_path)
        assert (done.code, done.err) == (0, ""), name
        assert f"echelon {name}" in done.out.partition("\n")[0], name


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


def test_a_tools_exit_code_and_error_are_its_own(tmp_path):
    command = [*MAIN, "report", "none"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 78
    assert done.stderr == "echelon: RUN=none: is no folder; give the folder of a run, as in runs/NAME\n"


def test_a_setting_is_no_tool(tmp_path):
    done = run(["report=1"], tmp_path)
    assert done.code == 78 and done.err.startswith("echelon: report=1: no such key")
