"""From a checked config to a trained model, in this process: one rank of the run."""

import json
import os
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainer import run as run_folder
from trainer.config import ALLOWED, build
from trainer.errors import ConfigError, DataError, exit_code
from trainer.launch import STOPPED, Place, detect, die_with_parent
from trainer.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.trainer import Trainer


def objects(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Trainer` (but for its place and name) that `config` describes."""
    section = config["trainer"]
    nested = {"checkpoint": CheckpointOptions(**section["checkpoint"]), "ddp": DDPOptions(**section["ddp"])}
    allow = (*ALLOWED, *section["allow_targets"])
    return {
        **{key: build(key, config[key], allow) for key in ("recipe", "optimizer", "schedule")},
        "callbacks": {name: build(f"callbacks.{name}", node, allow) for name, node in config["callbacks"].items()},
        **{key: config[key] for key in ("batch", "micro_batch", "accumulate")},
        "options": Options(**{**section, **nested}),
        "data": DataOptions(**config["data"]),
    }


def train(config: dict[str, Any], name: str, overrides: list[str], place: Place | None = None) -> int:
    """The exit code: 0, or 75 where a signal stopped the run."""
    trainer = Trainer(**objects(config), place=place, name=name)
    trainer.overrides = overrides
    if trainer.rank == 0:
        save_config(config, trainer.run_dir)
    describe(trainer, overrides)
    trainer.fit()
    return STOPPED if trainer.stop_reason == "signal" else 0


def save_config(config: dict[str, Any], run_dir: Path) -> Path:
    path = run_dir / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    return path


def describe(trainer: Trainer, overrides: list[str]) -> None:
    log, plan = run_folder.log, trainer.plan
    log.info("run %s  %s", trainer.run_dir, shlex.join(overrides))
    parameters = sum(p.numel() for p in trainer.module.parameters())
    log.info(
        "%d rank(s) on %s, %s, %s parameters; batch %d = %d rank(s) x %d micro-batch(es) x %d samples",
        trainer.world, trainer.device.type, trainer.precision.name, f"{parameters:,}",
        trainer.batch, trainer.world, plan.accumulate, plan.micro,
    )  # fmt: skip
    log.info(
        "callbacks, in order: %s", ", ".join(f"{n} ({c.role.name})" for n, c in trainer.callbacks.items()) or "none"
    )


def train_as_rank(file: Path, overrides: list[str]) -> int:
    """A rank that `launch.supervise` started. What it fails with goes to the file that the supervisor reads."""
    die_with_parent()
    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(file))
        return train(config, file.parent.name, overrides)
    except BaseException as error:
        user = isinstance(error, ConfigError | DataError)
        text = f"echelon: {error}" if user else traceback.format_exc()
        if int(os.environ["RANK"]):
            print(text, file=sys.stderr, flush=True)  # into this rank's log
        report = {"time": time.time(), "user": user, "text": text, "code": exit_code(error)}
        Path(os.environ["ECHELON_ERROR_FILE"]).write_text(json.dumps(report))
        return report["code"]


def train_under_launcher(config: dict[str, Any], name: str, overrides: list[str]) -> int:
    """A rank that torchrun, mpirun or srun started. torchrun prints the first failure of all ranks from the file that `record`
    writes; elsewhere each rank prints its own."""
    place = detect(os.environ, config["trainer"]["devices"], config["trainer"]["nodes"])
    if place.launcher == "torchrun":
        from torch.distributed.elastic.multiprocessing.errors import record

        return record(train)(config, name, overrides, place) or 0
    terminal = os.dup(2)
    try:
        return train(config, name, overrides, place)
    except Exception as error:
        if place.rank == 0:
            raise
        user = isinstance(error, ConfigError | DataError)
        os.write(terminal, f"echelon, rank {place.rank}: {error if user else traceback.format_exc()}\n".encode())
        return exit_code(error)
