"""A command ends with its code; an error of the user's is one line, and a signal lets `finally` run."""

import signal
import subprocess
import sys

import pytest
from support.cli import environment

START = """
import time
from scripts.command import command
from trainer.errors import ConfigError

def main():
    try:
        {body}
    finally:
        print("cleaned", flush=True)

command(main)
"""


def start(body: str) -> "subprocess.Popen[str]":
    command, pipe = [sys.executable, "-c", START.format(body=body)], subprocess.PIPE
    return subprocess.Popen(command, env=environment(), stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize(
    ("body", "code", "error"),
    [
        ("return", 0, ""),
        ("return 3", 3, ""),
        ("raise ConfigError('rows=x: no such row')", 78, "echelon: rows=x: no such row\n"),
    ],
)
def test_a_command_ends_with_its_code(body: str, code: int, error: str) -> None:
    with start(body) as process:
        assert process.communicate(timeout=20) == ("cleaned\n", error)
    assert process.returncode == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_finally_run(number: signal.Signals) -> None:
    with start("print('began', flush=True); time.sleep(60)") as process:
        assert process.stdout is not None and process.stdout.readline() == "began\n"
        process.send_signal(number)
        assert process.communicate(timeout=20) == ("cleaned\n", "")
    assert process.returncode == 128 + number
