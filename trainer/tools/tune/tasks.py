"""Runs one task on one rank: a trial, the profile of a rank alone, the outline of the model, or the links."""

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


def run_task(task: dict[str, Any], place: Place) -> dict[str, Any]:
    """Run a task on this rank, and return its result as JSON values.

    Args:
        task: `kind` and its arguments; `config` is that of a run.
    """
    config, kind = task["config"], task["kind"]
    options = config["trainer"]
    set_handlers()
    log.info("task %s", kind)
    folder = Path(task["folder"])
    folder.mkdir(parents=True, exist_ok=True)  # of the first machine, by name, on others
    with applied(build_options(NCCLOptions, config["nccl"]), os.environ), sockets_in(folder):
        if kind == "links":
            limit_s = options["timeout_s"]
            codecs = codecs_of(config, place, task["lossy"])
            return measure_links(place, options["accelerator"], options["backend"], limit_s, codecs)
        if kind == "outline":
            return outline(config)
        run = {"trial": run_trial, "profile": profile}[kind]
        return run(config, place, task["warm"], task["steps"])
