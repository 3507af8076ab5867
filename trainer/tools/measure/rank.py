"""Measures all parts on one rank of a bench and its peers."""

import argparse
import os
from typing import Any

from trainer.errors import ConfigError
from trainer.files import write_json
from trainer.process.environment import Place, detect
from trainer.timeouts import COLLECTIVE_S
from trainer.tools.measure.plot import draw

NEEDED = {"links", "codecs", "disk"}  # for the cost model's machine


def measure(options: argparse.Namespace) -> None:
    """Measure on this rank and its peers, and write the files. A collective."""
    place = detect(os.environ)
    write(bench(place, options), options, place)


def bench(place: Place, options: argparse.Namespace) -> dict[str, Any]:
    """Measure on this rank and its peers, print tables on rank 0, and return JSON values. A collective."""
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
