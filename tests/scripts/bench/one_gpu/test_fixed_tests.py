"""The tests that are rerun on a GPU: they are there, and a failure names them."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.cli import ROOT

from scripts.bench.harness import Failed
from scripts.bench.one_gpu import fixed_tests
from scripts.bench.one_gpu.cells import Cell

CELL, CPU = Cell("tests", "some"), torch.device("cpu")


@pytest.mark.parametrize(
    ("code", "output", "reason"),
    [
        (1, "FAILED tests/gpu/a.py::b - no\n1 failed, 2 passed in 3 s", "tests failed: FAILED tests/gpu/a.py::b - no"),
        (4, "no such option", "tests failed: no such option"),
    ],
)
def test_a_failure_names_the_tests(code, output, reason, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(returncode=code, stdout=output, stderr="")
    monkeypatch.setattr(fixed_tests.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(Failed) as failed:
        fixed_tests.run_tests(CELL, CPU, tmp_path)
    assert str(failed.value) == reason


def test_results_are_counted() -> None:
    assert fixed_tests.counts("...\n2 passed, 1 skipped in 3.1s") == {"passed": 2.0, "skipped": 1.0}


@pytest.mark.slow
def test_the_tests_are_there() -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "--collect-only", "-q", *fixed_tests.FIXED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "3 tests collected" in done.stdout, done.stdout
