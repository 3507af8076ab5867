"""A SIGTERM while the command imports its modules ends it like a run that has not begun."""

import subprocess
import sys

import pytest
from support.cli import environment

CODE = """
import os, signal, sys

class Stop:
    def find_spec(self, name, *_):
        if name == "trainer.config.folders":
            os.kill(os.getpid(), signal.SIGTERM)

sys.argv[0] = sys.argv[1]
sys.meta_path.insert(0, Stop())
import trainer.main
"""


@pytest.mark.parametrize(
    ("name", "variables", "code", "err"),
    [
        ("bin/echelon", {}, 75, "echelon: SIGTERM: stopped before the first step\n"),
        ("trainer/main.py", {}, 75, "echelon: SIGTERM: stopped before the first step\n"),
        ("trainer/main.py", {"RANK": "0"}, 75, ""),  # its launcher says so
        ("mine.py", {}, -15, ""),  # a program of the user's, which only imports this
    ],
)
def test_a_signal_during_the_imports(name, variables, code, err, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CODE, name], cwd=tmp_path, env=environment(**variables), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (code, err)
