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

from trainer.errors import ConfigError, nearest, refuse_remote, require
from trainer.files import refuse_folder
from trainer.process.arguments import ArgumentParser
from trainer.process.environment import detect, raise_file_limit
from trainer.process.exit import exit_process, run_guarded
from trainer.tools.measure.plot import require_matplotlib
from trainer.tools.measure.rank import measure

ALL = ("links", "codecs", "copies", "matmul", "disk", "shards")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


def run(options: argparse.Namespace) -> int:
    refuse(options)
    raise_file_limit()
    place = detect(os.environ)
    if place.launcher and options.devices not in (None, place.local_world):
        why = f"{place.launcher} started {place.local_world} rank(s) on this node"
        raise ConfigError(f"--devices={options.devices}: {why}; let the launcher start as many, or leave --devices out")
    from trainer.comm.device import count_gpus
    from trainer.launch.function import launch

    if not place.launcher and (devices := options.devices or count_gpus(options.accelerator)) > 1:
        launch(measure, options, devices=devices)
    else:
        measure(options)
    return 0


def refuse(options: argparse.Namespace) -> None:
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
    made.add_argument("--only", nargs="+", default=ALL, metavar="PART", help=f"of {', '.join(ALL)} (default: all)")
    made.add_argument("--devices", type=int, help="ranks to start here (default: one for each GPU, or one)")
    made.add_argument("--accelerator", choices=("auto", "cpu", "cuda"), default="auto")
    made.add_argument("--backend", choices=("auto", "gloo", "nccl", "mpi"), default="auto")
    known = ", ".join(COLLECTIVES)
    made.add_argument("--collectives", nargs="+", default=COLLECTIVES, metavar="NAME", help=f"of {known}")
    made.add_argument("--max-mib", type=int, default=64, help="the largest message (default: 64)")
    made.add_argument("--seconds", type=float, default=0.2, help="about, per message size; slower ones are left out")
    made.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure (default: the current one)")
    made.add_argument("--disk-mib", type=int, default=256, help="of the file that is written (default: 256)")
    made.add_argument("--shards", nargs="+", default=[], help="to read (default: shards of random bytes are made)")
    made.add_argument("--json", type=Path, metavar="FILE", help="all numbers, with the cost model's machine")
    made.add_argument("--png", type=Path, metavar="FILE", help="bus bandwidth over sizes; needs matplotlib")
    return made


def main() -> int:
    options = parser().parse_args()
    return run_guarded(lambda: run(options))


if __name__ == "__main__":
    exit_process(main())
