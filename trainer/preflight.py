"""The process that starts the ranks of this node: finds what can't work before it starts any."""

from typing import Any

import torch

from trainer.distributed import pick_backend
from trainer.errors import ConfigError
from trainer.launch import supervise
from trainer.plan import Plan
from trainer.run import make_run_dir, show_log
from trainer.session import objects, save_config


def count_devices(accelerator: str, devices: int | str) -> int:
    """Ranks to start on this node."""
    gpus = torch.cuda.device_count() if accelerator != "cpu" else 0
    if accelerator == "cuda" and not gpus:
        raise ConfigError(
            "trainer.accelerator=cuda: torch sees no CUDA device; use trainer.accelerator=cpu, or a CUDA build of torch"
        )
    if devices == "auto":
        return gpus or 1
    assert isinstance(devices, int)
    if devices < 1:
        raise ConfigError(f"trainer.devices={devices}: must be at least 1, or auto")
    if accelerator != "cpu" and gpus and devices > gpus:
        raise ConfigError(
            f"trainer.devices={devices}: this node has {gpus} CUDA device(s); use trainer.devices={gpus} or trainer.accelerator=cpu"
        )
    return devices


def preflight(config: dict[str, Any], name: str, overrides: list[str], devices: int) -> int:
    """Make everything but the model, as a rank would, so that what can't work ends here and data is prepared once; then start."""
    section = config["trainer"]
    cuda = section["accelerator"] != "cpu" and torch.cuda.device_count() > 0
    pick_backend(section["backend"], torch.device("cuda" if cuda else "cpu"))
    show_log(0)
    made = objects(config)
    del made["optimizer"]
    plan = Plan(
        made.pop("recipe"),
        made.pop("callbacks"),
        made.pop("schedule"),
        **made,
        world=devices,
        rank=0,
        first=lambda value: value,
    )
    run_dir = make_run_dir(section["run_dir"] or plan.manifest.get("run_dir"), name, plan.resumed is not None)
    config = {**config, "trainer": {**section, "run_dir": str(run_dir), "devices": devices}}
    if plan.resumed:
        config["trainer"]["resume"] = str(plan.resumed)
    file = save_config(config, run_dir)
    return supervise(["--resolved", str(file), *overrides], devices, run_dir / "logs")
