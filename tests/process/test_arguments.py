"""A wrong argument of a tool is one line with exit code 78, by `echelon TOOL` and by `python -m` alike."""

import os
import subprocess
import sys

import pytest

from trainer.main import tools

MODULES = sorted(set(tools()) - {"tune"})  # tune's arguments are a run's own


@pytest.mark.parametrize("name", ["compare", *(pytest.param(n, marks=pytest.mark.slow) for n in MODULES)])
def test_an_unknown_option(name, tmp_path):
    command = [sys.executable, "-m", f"trainer.tools.{name}", "--unknown"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 78
    assert done.stdout == "" and done.stderr.count("\n") == 1 and "--help" in done.stderr
