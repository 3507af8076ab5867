"""Runs the tests of tests/gpu that failed on the H200 and were fixed since."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from scripts.bench.harness import Failed
from scripts.bench.one_gpu.cells import Cell

ROOT = Path(__file__).parents[3]
STATE = "tests/gpu/test_state.py::test_training_goes_on_bit_for_bit"
FIXED = (
    f"{STATE}[asgd-torch.float32]",
    f"{STATE}[asgd-torch.bfloat16]",
    "tests/gpu/test_memory.py::test_above_the_share_the_run_ends_with_advice_and_a_snapshot",
)


def run_tests(cell: Cell, device: torch.device, folder: Path) -> dict[str, float]:
    """Run the tests with scripts/gpu_test, and count their results.

    Raises:
        Failed: A test failed, or did not run.
    """
    command = ["bash", str(ROOT / "scripts" / "gpu_test"), "-q", f"--basetemp={folder / 'tests'}", *FIXED]
    env = os.environ | {"PYTHON": sys.executable, "ECHELON_TEST_DEVICE": device.type}
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        bad = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-1:]
        raise Failed(f"tests failed: {'; '.join(bad)}")
    return counts(done.stdout)


def counts(output: str) -> dict[str, float]:
    """Read the last line of pytest's output."""
    found = re.findall(r"(\d+) (passed|skipped)", output.splitlines()[-1])
    return {"passed": 0.0, "skipped": 0.0} | {word: float(count) for count, word in found}
