"""A wrong argument of a tool is one line with exit code 78, by `echelon TOOL` and by `python -m` alike."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.main import tools
from trainer.process.arguments import ArgumentParser

MODULES = sorted(set(tools()) - {"tune"})  # tune's arguments are a run's own


@pytest.mark.parametrize("name", ["compare", *(pytest.param(n, marks=pytest.mark.slow) for n in MODULES)])
def test_an_unknown_option(name, tmp_path):
    command = [sys.executable, "-m", f"trainer.tools.{name}", "--unknown"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 78
    assert done.stdout == "" and done.stderr.count("\n") == 1 and "--help" in done.stderr


@pytest.mark.parametrize(("words", "key"), [(["s3://b/run"], "RUN"), (["runs/a", "--json", "s3://b/run"], "--json")])
def test_a_url_is_no_path(words, key, capsys):
    made = ArgumentParser(prog="echelon tool")
    made.add_argument("run", type=Path, metavar="RUN")
    made.add_argument("--json", type=Path)
    with pytest.raises(SystemExit) as ended:
        made.parse_args(words)
    said = capsys.readouterr().err
    assert ended.value.code == 78 and said.count("\n") == 1
    assert said.startswith(f"echelon: {key}=s3://b/run: is a URL, and only local paths work here; mount")
    assert made.parse_args(["runs/a"]).run == Path("runs/a")
