"""Starts the processes of a tool that trains briefly: a team of ranks, and the first process, which leads it."""

import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.config.build import build_options
from trainer.config.check import check
from trainer.config.compose import Job, compose
from trainer.config.folders import CONF, config_dirs
from trainer.config.options import Options
from trainer.errors import ConfigError
from trainer.log import log_to_terminal, show
from trainer.process.environment import USUAL, Place, avoid_foreign_cache, detect, raise_file_limit
from trainer.process.temporary import temporary_folder

COMPILED = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # folders of code that trials compile


def one_job(words: list[str], tool: str) -> Job | None:
    """Return the checked run that the arguments describe, and print its messages; None if Hydra showed something."""
    jobs = compose(words, [CONF, *config_dirs(words)])
    if len(jobs) > 1:
        raise ConfigError(f"-m: gives {len(jobs)} runs, and {tool} takes one; leave -m out")
    for job in jobs:
        check(job.config)
        show(job.messages, detect(dict(os.environ)).rank)
    return jobs[0] if jobs else None


def prepare() -> None:
    """Set this process up as `trainer.main` does before torch loads. A signal ends it with clean-up."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    raise_file_limit()
    os.environ.update(USUAL | os.environ)
    os.environ.setdefault("WDS_SECURE", "1")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else forks could not open the GPUs
    avoid_foreign_cache(os.environ)
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def stop(number: int, _: object) -> None:
    """Exit through the `finally` blocks that end processes and remove files."""
    raise SystemExit(128 + number)


def run_team(
    config: dict[str, Any], work: Callable[[dict[str, Any], Place], dict[str, Any]], lead: Callable[[Any], int]
) -> int:
    """Form a team of the config's ranks, or join a launcher's. Return the result of `lead`; 0 on other processes.

    Args:
        work: Runs a task on one rank, and returns its result as JSON values.
        lead: Called with the team on its first process.
    """
    from trainer.tools.tune.team import Team

    place = find_place(config)
    log_to_terminal(1)
    with temporary_folder() as temporary:
        for name in COMPILED:
            os.environ[name] = str(Path(temporary) / "compiled")
        importlib.import_module("torch._dynamo")  # for DDP and optimizers: each fork would take a second for it
        gc.freeze()
        team = Team(place, temporary, work)
        try:
            if not team.leads:
                team.serve()
                return 0
            return lead(team)
        finally:
            team.close()


def find_place(config: dict[str, Any]) -> Place:
    """Return this process's place: a launcher's rank, or the first of all ranks of this machine."""
    from trainer.launch.launcher import count_devices

    options = build_options(Options, config["trainer"])
    place = detect(os.environ, options.devices, options.nodes)
    if place.launcher:
        return place
    devices, _ = count_devices(options)
    return Place(0, devices, 0, devices, starts=True)
