"""echelon bench: measures links, codecs, copies, matrix products, disk and shards of this machine.

    echelon bench --devices 2 --json bench.json --png bench.png     starts two ranks on this machine
    torchrun --nnodes 2 --nproc-per-node 8 -m trainer.tools.bench                   under a launcher, on all nodes
    echelon bench --only disk shards --folder /data                 one rank, and no links

Times and bandwidths of collectives are as nccl-tests defines them. Latency and rate of each level of the network are
fitted to the times. MB are 1,000,000 bytes.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError, nearest, refuse_remote, require
from trainer.files import refuse_folder, write_json
from trainer.process.arguments import ArgumentParser
from trainer.process.environment import Place, detect, raise_file_limit
from trainer.process.exit import exit_process, run_guarded
from trainer.timeouts import COLLECTIVE_S
from trainer.tools.measure.plot import draw, require_matplotlib

ALL = ("links", "codecs", "copies", "matmul", "disk", "shards")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
NEEDED = {"links", "codecs", "disk"}  # for the cost model's machine


def bench(place: Place, options: argparse.Namespace) -> dict[str, Any]:
    """Measure on this rank and its peers, print tables on rank 0, and return all as JSON values. A collective."""
    import torch

    from trainer.comm.ranks import Ranks
    from trainer.precision.formats import fastest
    from trainer.tools.measure.collectives import FITTED
    from trainer.tools.measure.host import share
    from trainer.tools.measure.parts import PARTS
    from trainer.tools.measure.report import Report

    ranks = Ranks(place, options.accelerator, options.backend, COLLECTIVE_S)
    try:
        device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
        network = ranks.backend if ranks.world > 1 else "no network"
        about = f"{ranks.world} rank(s), {network}, {device}, torch {torch.__version__}"
        report = Report(ranks.rank == 0)
        report.say(about)
        for part, measure in PARTS.items():
            if part in options.only:
                measure(ranks, options, report)
        cores, memory = share(ranks)
        whole = {*options.only} >= NEEDED and FITTED in options.collectives
        machine = report.machine(ranks.world, cores, memory, ranks.backend) if whole else None
        if not whole:
            report.miss(f"machine: not made: the cost model needs {' '.join(sorted(NEEDED))}, and {FITTED}")
        return report.as_json({"about": about, "auto_precision": fastest(ranks.device)}, machine)
    finally:
        ranks.close()


def run(options: argparse.Namespace) -> int:
    """Start ranks, or measure as one of them. Return the exit code.

    Raises:
        ConfigError: An option can't work, or contradicts the launcher.
    """
    refuse(options)
    raise_file_limit()
    place = detect(os.environ)
    if place.launcher and options.devices not in (None, place.local_world):
        why = f"{place.launcher} started {place.local_world} rank(s) on this node"
        raise ConfigError(f"--devices={options.devices}: {why}; let the launcher start as many, or leave --devices out")
    if not place.launcher and (devices := options.devices or count(options.accelerator)) > 1:
        from trainer.launch.function import launch
        from trainer.tools import bench as module  # noqa: PLW0406 in a rank, `__main__` is another module

        launch(module.measure, options, devices=devices)
    else:
        measure(options)
    return 0


def measure(options: argparse.Namespace) -> None:
    """Measure on this rank and its peers, and write the files. A collective."""
    place = detect(os.environ)
    write(bench(place, options), options, place)


def count(accelerator: str) -> int:
    from trainer.comm.device import count_gpus

    return count_gpus(accelerator) or 1


def write(found: dict[str, Any], options: argparse.Namespace, place: Place) -> None:
    if place.rank:
        return
    try:
        if options.json:
            write_json(options.json, found)
        if options.png:
            draw(found, options.png)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; give --json and --png other places") from None


def refuse(options: argparse.Namespace) -> None:
    """Refuse options that can't work, before anything is measured.

    Raises:
        ConfigError: An option is out of range or unknown, a file can't be written, or matplotlib is missing.
    """
    for name in ("devices", "max_mib", "disk_mib"):
        require(f"--{name.replace('_', '-')}", getattr(options, name), at_least=1)
    require("--seconds", options.seconds, above=0)
    for key, given, known in (("only", options.only, ALL), ("collectives", options.collectives, COLLECTIVES)):
        for name in given:
            if name not in known:
                raise ConfigError(f"--{key} {name}: is unknown; {nearest(name, known)}")
    refuse_remote("--folder", options.folder)
    for name in ("json", "png"):
        path = getattr(options, name)
        refuse_folder(f"--{name}", path)
        if path and not os.access(path.parent, os.W_OK):
            raise ConfigError(f"--{name} {path}: {path.parent} is no folder that can be written; give another place")
    require_matplotlib(options.png)


def parser() -> ArgumentParser:
    made = ArgumentParser("echelon bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", nargs="+", default=ALL, metavar="PART", help=f"of {', '.join(ALL)}; without it all")
    made.add_argument("--devices", type=int, help="ranks to start here; without it one for each GPU, or one")
    made.add_argument("--accelerator", choices=("auto", "cpu", "cuda"), default="auto")
    made.add_argument("--backend", choices=("auto", "gloo", "nccl", "mpi"), default="auto")
    made.add_argument(
        "--collectives", nargs="+", default=COLLECTIVES, metavar="NAME", help=f"of {', '.join(COLLECTIVES)}"
    )
    made.add_argument("--max-mib", type=int, default=64, help="the largest message; without it 64")
    made.add_argument(
        "--seconds", type=float, default=0.2, help="for each size of a message, about; larger ones are left out"
    )
    made.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure; without it the current one")
    made.add_argument("--disk-mib", type=int, default=256, help="of the file that is written; without it 256")
    made.add_argument("--shards", nargs="+", default=[], help="to read; without it shards of random bytes are made")
    made.add_argument("--json", type=Path, metavar="FILE", help="all numbers, with the cost model's machine")
    made.add_argument("--png", type=Path, metavar="FILE", help="bus bandwidth over sizes; needs matplotlib")
    return made


def main() -> int:
    options = parser().parse_args()
    return run_guarded(lambda: run(options))


if __name__ == "__main__":
    exit_process(main())
