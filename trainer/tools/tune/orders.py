"""Runs one order on one rank: a trial, the profile of a rank alone, the outline of the model, or the links."""

import os
from pathlib import Path
from typing import Any

from trainer.comm.nccl import NCCLOptions, applied
from trainer.config.build import build_options
from trainer.log import log, set_handlers
from trainer.process.environment import Place
from trainer.process.temporary import sockets_in
from trainer.tools.tune.links import codecs_of, measure_links
from trainer.tools.tune.measure import profile
from trainer.tools.tune.trial import run_trial
from trainer.tools.tune.workload import outline


def run_order(order: dict[str, Any], place: Place) -> dict[str, Any]:
    """Run an order on this rank, and return its result as JSON values.

    Args:
        order: `kind` and its arguments; `config` is that of a run.
    """
    config, kind = order["config"], order["kind"]
    options = config["trainer"]
    set_handlers()
    log.info("order %s", kind)
    folder = Path(order["folder"])
    folder.mkdir(parents=True, exist_ok=True)  # of the first machine, by name, on others
    with applied(build_options(NCCLOptions, config["nccl"]), os.environ), sockets_in(folder):
        if kind == "links":
            limit_s = options["timeout_s"]
            codecs = codecs_of(config, place, order["lossy"])
            return measure_links(place, options["accelerator"], options["backend"], limit_s, codecs)
        if kind == "outline":
            return outline(config)
        run = {"trial": run_trial, "profile": profile}[kind]
        return run(config, place, order["warm"], order["steps"])
