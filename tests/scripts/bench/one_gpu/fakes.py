"""A run of fake cells, each in a real process: `python -m fakes FOLDER`. The last cell never ends."""

import os
import sys
import time
from pathlib import Path

from scripts.bench.harness import Failed, Report, alone
from scripts.bench.one_gpu import run
from scripts.bench.one_gpu.cells import Cell, Part


def fake(cell: Cell, folder: str) -> dict[str, float]:
    if cell.trainer == "fails":
        raise Failed("Traceback\nrefused: no such thing")
    if cell.trainer == "ends":
        os._exit(3)
    if cell.trainer == "hangs":
        Path(sys.argv[1], "pid").write_text(str(os.getpid()))
        time.sleep(1000)
    return {"ms a step": 1.0, "tokens/s": 12345.0, "peak GiB": 3.0}


PLAN = [
    Part("first", 900, [Cell("speed", "quick"), Cell("speed", "fails"), Cell("speed", "ends")]),
    Part("second", 900, [Cell("speed", "hangs"), Cell("speed", "late")]),
]

if __name__ == "__main__":
    run.attempt, run.CELL_S = fake, 900
    run.alone = lambda *args, limit_s, fork: alone(*args, limit_s=limit_s)  # without a server, which loads torch
    with Report(None) as report:
        run.run_all(PLAN, run.Results(Path(sys.argv[1]), report))
