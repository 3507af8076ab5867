"""Runs a function on several real processes that talk through gloo."""

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainer.launch.pool import Pool, fork
from trainer.process.environment import Place


def run_ranks(world: int, function: Callable[[Place, Path], Any], timeout_s: float) -> list[Any]:
    """Run `function(place, folder)` on `world` processes that are forked from this one; return the results.

    All have the same new folder, which is gone afterwards, with all that they print.

    Raises:
        AssertionError: A rank failed, or took too long. The message has its error.
    """
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as name:
        private = Path(name)

        def start(place: Place) -> Any:
            return fork(partial(_run, function, place, Path(folder), private), private / f"log-{place.rank}")

        with Pool(Place(0, world, 0, world, launcher="test", starts=True), private, start) as pool:
            for codes in pool.watch():
                for rank in codes.keys() - results.keys():
                    error = private / f"error-{rank}"
                    why = error.read_text() if error.exists() else "the process died"
                    assert not codes[rank], f"rank {rank} of {world}: {why}"
                    results[rank] = pickle.loads((private / f"result-{rank}").read_bytes())
                waiting = pool.ranks.keys() - codes.keys()
                late = waiting and time.monotonic() >= deadline
                assert not late, f"rank {min(waiting)} of {world} did not end in {timeout_s:.0f} s"
    return [results[rank] for rank in range(world)]


def _run(function: Callable[[Place, Path], Any], place: Place, folder: Path, private: Path) -> int:
    import torch

    torch.set_num_threads(1)  # the threads of the process that was forked are not here
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.chdir(folder)
    try:
        (private / f"result-{place.rank}").write_bytes(pickle.dumps(function(place, folder)))
    except BaseException as error:
        (private / f"error-{place.rank}").write_text("".join(traceback.format_exception(error)).rstrip())
        return 1
    return 0
