"""Runs a function on several real processes that communicate over gloo."""

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainer.launch.pool import Pool, Process, fork
from trainer.process.environment import Place


def run_ranks(world: int, function: Callable[[Place, Path], Any], timeout_s: float) -> list[Any]:
    """Fork `world` processes that call `function(place, folder)`, and return their results.

    They share a temporary folder. Raise AssertionError, with the error of the rank, if one fails or exceeds the
    timeout.
    """
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as name:
        private = Path(name)

        def start(place: Place) -> Process:
            return fork(place, partial(_run, function, Path(folder), private), private / f"log-{place.rank}")

        with Pool(Place(0, world, 0, world, launcher="test", starts=True), private, start) as pool:
            for codes in pool.watch():
                errors = {rank: private / f"error-{rank}" for rank in codes.keys() - results.keys()}
                first = {rank: error.stat().st_mtime_ns if error.exists() else 0 for rank, error in errors.items()}
                for rank in sorted(errors, key=first.__getitem__):  # the first one, because its peers fail after it
                    result = private / f"result-{rank}"
                    why = errors[rank].read_text() if first[rank] else "the process died"
                    assert not codes[rank] and result.exists(), f"rank {rank} of {world}: {why}"
                    results[rank] = pickle.loads(result.read_bytes())
                waiting = pool.ranks.keys() - codes.keys()
                late = waiting and time.monotonic() >= deadline
                assert not late, f"rank {min(waiting)} of {world} did not end in {timeout_s:.0f} s"
    return [results[rank] for rank in range(world)]


def _run(function: Callable[[Place, Path], Any], folder: Path, private: Path, place: Place) -> int:
    import torch

    torch.set_num_threads(1)  # the parent's threads do not exist here
    os.chdir(folder)
    try:
        (private / f"result-{place.rank}").write_bytes(pickle.dumps(function(place, folder)))
    except BaseException as error:
        (private / f"error-{place.rank}").write_text("".join(traceback.format_exception(error)).rstrip())
        return 1
    return 0
