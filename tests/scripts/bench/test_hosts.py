"""The server of turns."""

import json
import subprocess
import sys

import pytest
from support.cli import environment


@pytest.mark.slow
def test_a_turn_that_dies_is_told_and_the_next_is_taken() -> None:
    command = [sys.executable, "-m", "scripts.bench.comm.rank"]
    orders = "".join(json.dumps({"row": row}) + "\n" for row in ("nonsense", "other"))
    done = subprocess.run(command, env=environment(), input=orders, capture_output=True, text=True, timeout=60)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"started": True},
        {"error": "KeyError: 'nonsense'"},
        {"error": "ended with code 1"},
        {"error": "KeyError: 'other'"},
        {"error": "ended with code 1"},
    ]
