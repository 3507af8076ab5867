"""Starts a run from a checked config: in this process, in ranks that it starts, or as a rank of a launcher."""

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import locate
from trainer.comm.device import count_gpus, pick_backend
from trainer.config.build import build_options
from trainer.config.options import Options
from trainer.errors import ConfigError
from trainer.files import remove_unused
from trainer.inference.dry_run import dried
from trainer.launch.supervisor import Supervisor
from trainer.launch.worker import train_under_launcher
from trainer.log import log_to_terminal
from trainer.plan import Plan, RunSpec
from trainer.precision import Precision
from trainer.process.environment import Place, refuse_without_loopback
from trainer.process.temporary import sockets_in, temporary_folder
from trainer.run_dir import make_run_dir, nothing_left
from trainer.session import build_components, end, train
from trainer.summary import go_on
from trainer.timeouts import PLANNING, START_S, STILL


def start(config: dict[str, Any], name: str, argv: list[str], place: Place) -> int:
    """Train, and return the exit code: 0, or 75 if a signal stopped the run."""
    if place.launcher and not place.starts:
        return train_under_launcher(config, name, argv, place)
    options = build_options(Options, config["trainer"])
    devices, gpus = count_devices(options)
    pick_backend(options.backend, torch.device("cuda" if gpus else "cpu"))
    if not gpus:  # with GPUs the ranks check it, because this process creates no CUDA context
        Precision(options.precision, torch.device("cpu"), master_weights=options.master_weights)
    if devices == 1:
        with temporary_folder() as folder, sockets_in(folder):
            return train(config, name, argv, place)
    if options.dry_run and place.starts:
        raise ConfigError("trainer.dry_run=true: one task starts the ranks of a node; give srun a task for each rank")
    if place.starts:  # rank 0 plans for all nodes; no rank is restarted alone
        return supervise(config, None, argv, place, 0, math.inf)
    if options.dry_run:
        with temporary_folder() as folder:
            dry = {**config, "trainer": asdict(dried(options, folder))}
            return start_ranks(dry, name, argv, devices)
    return start_ranks(config, name, argv, devices)


def count_devices(options: Options) -> tuple[int, int]:
    """Return the ranks that this process starts, and this node's GPUs, which must not be fewer."""
    gpus = count_gpus(options.accelerator)
    devices = (gpus or 1) if isinstance(options.devices, str) else options.devices
    if gpus and devices > gpus:
        raise ConfigError(
            f"trainer.devices={devices}: this node has {gpus} CUDA device(s); "
            f"use trainer.devices={gpus} or trainer.accelerator=cpu"
        )
    return devices, gpus


def start_ranks(config: dict[str, Any], name: str, argv: list[str], devices: int) -> int:
    """Plan the run, then start the ranks, so that data is prepared once and an invalid run fails at once."""
    log_to_terminal(0)
    refuse_without_loopback()
    began = time.monotonic()
    components = build_components(config)
    del components["optimizer"]
    plan, options = Plan(**components, place=Place(world=devices), each=lambda value: [value]), components["options"]
    planning_s = time.monotonic() - began
    run_dir = make_run_dir(plan, name)
    if nothing_left(plan, run_dir):
        return 0
    spec, decided = plan.spec, {"run_dir": str(run_dir), "devices": devices}
    decided |= {"resume": spec.checkpoint[0]} if spec.checkpoint else {}
    del components, plan  # the ranks open the data themselves
    config = {**config, "trainer": config["trainer"] | decided}
    start_s = START_S + PLANNING * planning_s  # the data is already prepared
    try:
        return supervise(config, spec, argv, Place(0, devices, 0, devices, starts=True), options.restarts, start_s)
    finally:
        remove_unused()


def supervise(
    config: dict[str, Any], spec: RunSpec | None, argv: list[str], place: Place, restarts: int, start_s: float
) -> int:
    """Start this node's ranks with the launcher's decisions, and restart them after a failure."""
    options = config["trainer"]
    run_dir = Path(options["run_dir"])
    saved = Path(options["checkpoint"]["dir"]) / run_dir.name

    def describe_run(moved: bool) -> str:
        again = {"resume": "auto"} if moved and locate.checkpoints(saved) else {}
        run = {"config": {**config, "trainer": options | again}, "spec": asdict(spec) if spec else None}
        return json.dumps(run)

    def resume_hint() -> str:
        return f"; resume with {go_on(argv, saved)}" if any(saved.glob("step-*")) else ""

    logs, still_s = run_dir / "logs", STILL * options["timeout_s"]
    supervisor = Supervisor(describe_run, argv, place, logs, resume_hint, restarts, still_s, start_s)
    return end(supervisor.run())
