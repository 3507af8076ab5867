"""Data workers that the system gives too little: one line names the limit, and nobody waits."""

import os
import shutil
import time

import pytest
from support.cli import MAIN, TOY, run

# A user who may do all with files: the limit does not hold for root.
CAPABLE = [
    "setpriv",
    "--reuid=54322",
    "--clear-groups",
    "--inh-caps=-all,+dac_override",
    "--ambient-caps=+dac_override",
]
WORDS = [*TOY, "~callbacks.tensorboard", "trainer.max_steps=6", "trainer.validate_every=null", "data.workers=2"]


@pytest.mark.skipif(not shutil.which("prlimit"), reason="util-linux's prlimit is missing")
def test_too_few_files_are_named_before_a_batch_is_lost(tmp_path):
    result = run(WORDS, tmp_path, ["prlimit", "--nofile=32:32", *MAIN])
    assert result.code == 78
    said = "echelon: data.workers: ulimit -n=32: too few files may be open; raise it, or give fewer data.workers"
    assert result.err.startswith(said) and result.err.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, to run as another user")
@pytest.mark.parametrize("most", [8, pytest.param(12, marks=pytest.mark.slow)])
def test_too_few_processes_end_the_run_soon(tmp_path, most):
    """A worker can't be forked, or has no thread for its tensors. If one has none to send a batch, torch tells it."""
    began = time.monotonic()
    result = run(WORDS, tmp_path, [*CAPABLE, "prlimit", f"--nproc={most}", *MAIN], HOME=str(tmp_path))
    assert time.monotonic() - began < 50
    assert result.code in (1, 78)
    named = f"ulimit -u={most}: too few processes and threads may run; raise it, or give fewer" in result.err
    assert (named and result.err.count("\n") == 1) or "can't start new thread" in result.err
