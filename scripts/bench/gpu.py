"""Tests and measures Echelon on one GPU: `python scripts/bench/gpu.py` also runs where Echelon is not installed."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    if not __package__:  # a script, whose own folder would hide modules of Python's
        sys.path[0] = str(ROOT)
        sys.path.append(str(ROOT / ".gpu"))  # of scripts/gpu_wheels.sh
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / ".gpu"), os.environ.get("PYTHONPATH", "")])
    from scripts.bench.one_gpu.run import main
    from scripts.command import command

    command(main)
