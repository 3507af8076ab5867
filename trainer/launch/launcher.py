"""From a checked config to a run: in this process, in ranks that it starts, or as one of a launcher's."""

import math
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from trainer.checkpoint import locate
from trainer.comm.device import count_gpus, pick_backend
from trainer.config.build import settings
from trainer.config.options import Options
from trainer.errors import ConfigError
from trainer.launch.supervisor import Supervisor
from trainer.launch.worker import train_under_launcher
from trainer.log import show_log
from trainer.plan import Plan
from trainer.precision import Precision
from trainer.process.environment import Place
from trainer.run_dir import make_run_dir
from trainer.session import ended, found_data, objects, train
from trainer.summary import go_on


def start(config: dict[str, Any], name: str, typed: list[str], place: Place) -> int:
    """The exit code: 0, or 75 where a signal stopped the run."""
    if place.launcher and not place.starts:
        return train_under_launcher(config, name, typed, place)
    options = settings(Options, config["trainer"])
    gpus = count_gpus(options.accelerator)
    devices = (gpus or 1) if isinstance(options.devices, str) else options.devices
    if gpus and devices > gpus:
        raise ConfigError(
            f"trainer.devices={devices}: this node has {gpus} CUDA device(s); "
            f"use trainer.devices={gpus} or trainer.accelerator=cpu"
        )
    pick_backend(options.backend, torch.device("cuda" if gpus else "cpu"))
    if not gpus:  # else the ranks ask: this process makes no context on a GPU
        Precision(options.precision, torch.device("cpu"))
    if devices == 1:
        return train(config, name, typed, place)
    if place.starts:  # the ranks of all nodes plan together; none is started again alone
        return supervise(config, typed, place, 0, math.inf)
    return start_ranks(config, name, typed, devices)


def start_ranks(config: dict[str, Any], name: str, typed: list[str], devices: int) -> int:
    """Plans the run as a rank would, so that what can't work ends here and data is prepared once; then starts them."""
    show_log(0)
    began = time.monotonic()
    made = objects(config)
    del made["optimizer"]
    plan, options = Plan(**made, place=Place(world=devices), each=lambda value: [value]), made["options"]
    planned_s, config = time.monotonic() - began, {**config, "planned": found_data(plan)}
    found = {"run_dir": str(make_run_dir(plan, name)), "devices": devices}
    found |= {"resume": str(plan.resumed)} if plan.resumed else {}
    del made, plan  # the ranks open the data themselves
    config = {**config, "trainer": config["trainer"] | found}
    # Planning took here what nobody can foresee; ranks find the data prepared.
    return supervise(config, typed, Place(0, devices, 0, devices, starts=True), options.restarts, 60 + 10 * planned_s)


def supervise(config: dict[str, Any], typed: list[str], place: Place, restarts: int, start_s: float) -> int:
    options = config["trainer"]
    run_dir = Path(options["run_dir"])
    saved = Path(options["checkpoint"]["dir"]) / run_dir.name

    def resolved(moved: bool) -> str:
        again = {"resume": "auto"} if moved and locate.checkpoints(saved) else {}
        return OmegaConf.to_yaml(OmegaConf.create({**config, "trainer": options | again}))

    def further() -> str:
        return f"; go on with {go_on(typed, saved)}" if any(saved.glob("step-*")) else ""

    logs, still_s = run_dir / "logs", 2 * options["timeout_s"]
    return ended(Supervisor(resolved, typed, place, logs, further, restarts, still_s, start_s).run())
