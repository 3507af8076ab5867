"""Compares Echelon with other trainers: speed, memory, time to the first step, resume, stall by a checkpoint, code.

    python -m scripts.bench.peers --out docs/measurements/peers.md          # about 25 minutes, idle
    python -m scripts.bench.peers --peers 'bare|Echelon' --cells 'transformer, 1' --rounds 5

Each peer trains the same model with the same optimizer, by a script that its users could write, in processes of its
own. In each round every peer has a run, and the next round turns the order round. A speed is the median over rounds of
the ratio to the bare loop in the same round. A run saves one checkpoint. A second run resumes it. The bare loop is
always measured. Ranks have one thread each, or a GPU each where there are enough. DeepSpeed installs by
`DS_BUILD_OPS=0 pip install --no-build-isolation -c constraints.txt deepspeed`, and builds an operator as it first runs.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from scripts.bench.harness import (
    Failed,
    Report,
    Rounds,
    Row,
    Turn,
    matching,
    missing,
    parser,
)  # fmt: skip
from scripts.bench.peers.table import BARE, lines_of_code, numbers, rows
from scripts.bench.peers.task import TASK, TICKS
from scripts.command import command

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
LIMIT_S, ROUNDS = 300, 5


class Peer(NamedTuple):
    """A script in this package, and the packages that it needs."""

    script: str
    packages: tuple[str, ...] = ()
    launched: bool = False  # needs the variables of a launcher on one rank, too
    never: str = ""  # why it has no script


PEERS = {
    "bare loop": Peer("bare"),
    "Echelon": Peer("echelon"),
    "Lightning": Peer("lightning", ("lightning",)),
    "Accelerate": Peer("accelerate", ("accelerate",)),
    "Hugging Face Trainer": Peer("hugging_face", ("transformers", "accelerate")),
    "DeepSpeed": Peer("deepspeed", ("deepspeed",), launched=True),
    "Composer": Peer("", never="mosaicml 0.32.1 wants torch below 2.7.1, and imports torchvision"),
}
PACKAGES = ("torch", *dict.fromkeys(package for peer in PEERS.values() for package in peer.packages))


@dataclass(frozen=True)
class Cell:
    """A model on a number of ranks. A run has `warm` steps, and saves after the `save_at`-th of `steps`."""

    model: str
    ranks: int
    warm: int
    save_at: int
    steps: int
    resumes: bool = False

    def __str__(self) -> str:
        return f"{self.model}, {self.ranks} rank{'s' * (self.ranks > 1)}"


CELLS = [
    Cell("MLP", 1, 50, 450, 650),
    Cell("transformer", 1, 3, 19, 27, resumes=True),
    Cell("transformer", 2, 3, 19, 27),
]


def run(cell: Cell, peer: Peer) -> Turn:
    """Run a peer in a folder of its own, and once more if the cell has a resume. Return its numbers.

    Raises:
        Failed: A process ended with an error, or not in time.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        began, found = start(cell, peer, Path(folder), cell.steps, cell.steps)
        result = numbers(began, found["ticks"], found["peak"], cell.warm, cell.save_at)
        if cell.resumes:
            began, found = start(cell, peer, Path(folder), cell.steps + 2, 2)
            result["resume_s"] = found["ticks"][0] - began
    return result


def start(cell: Cell, peer: Peer, folder: Path, steps: int, ticks: int) -> tuple[float, dict]:
    """Run a peer's script to its end. Return the time of its start, and what it wrote after `ticks` steps."""
    order = {"model": cell.model, "steps": steps, "save_at": cell.save_at, "ticks": ticks}
    module = ["-m", f"scripts.bench.peers.train_{peer.script}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cell.ranks}"]
    words = [sys.executable, *(launcher if cell.ranks > 1 else []), *module]
    (folder / TICKS).unlink(missing_ok=True)
    with open(folder / "log", "wb") as log:
        began = time.monotonic()
        process = subprocess.Popen(
            words, cwd=folder, env=environment(peer, cell, order), stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"no end in {LIMIT_S} s") from None
        finally:  # also at a signal; launchers leave ranks behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code or not (folder / TICKS).exists():
        last = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
        raise Failed(f"ended with code {code}: {' '.join(last)[:200]}")
    return began, json.loads((folder / TICKS).read_text())


def environment(peer: Peer, cell: Cell, order: dict) -> dict[str, str]:
    """Return the variables of a run. A rank has one thread, and one rank sees one GPU."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", TASK: json.dumps(order)}
    if cell.ranks == 1:
        more["CUDA_VISIBLE_DEVICES"] = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
        if peer.launched:
            more |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    return {**os.environ, **more}


def measure(cell: Cell, names: list[str], rounds: int) -> list[Row]:
    """Run the peers by turns. A peer that fails has no further runs, and its row says so."""
    lacks = {name: PEERS[name].never or missing(PEERS[name].packages) for name in names}
    found = Rounds.of(name for name in names if not lacks[name])
    found.run(rounds, lambda name: run(cell, PEERS[name]), f"{cell}, ")
    failed = {name: f"failed: {error}" for name, error in found.failed.items()}
    found.failed = failed | {name: f"not installed: {lack}" for name, lack in lacks.items() if lack}
    scripts = {name: HERE / f"train_{PEERS[name].script}.py" for name in names}
    part = f"{cell}; {cell.save_at - cell.warm - 1} steps are timed after {cell.warm}; at most {rounds} rounds"
    return rows(part, found, {name: lines_of_code(path) if path.exists() else "-" for name, path in scripts.items()})


def options() -> argparse.Namespace:
    rounds, out = f"of each peer; without it {ROUNDS}", "write the tables to a page of Markdown"
    made = parser("peers", __doc__, "1 round, MLP on one rank: a minute", rounds, out)
    made.add_argument("--peers", default="", metavar="REGEX", help=f"search in names: {', '.join(PEERS)}")
    made.add_argument("--cells", default="", metavar="REGEX", help=f"search in: {'; '.join(map(str, CELLS))}")
    return made.parse_args()


def main() -> int:
    args = options()
    names = [name for name in PEERS if name == BARE or re.search(args.peers, name)]
    cells = matching("--cells", args.cells or ("^MLP" if args.quick else ""), CELLS)
    rounds = args.rounds or (1 if args.quick else ROUNDS)
    with Report(args.json, PACKAGES, args.out) as report:
        for cell in cells:
            report.add(measure(cell, names, rounds))
    return int(any("failed" in str(each["ms a step"]) for table in report.tables for each in table))


if __name__ == "__main__":
    command(main)
