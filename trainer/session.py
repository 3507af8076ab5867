"""From a checked config to a trained model, in this process."""

import os
import shlex
import signal
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainer.checkpoint.compare import flat
from trainer.comm.nccl import NCCLOptions, in_words
from trainer.config.build import build, settings
from trainer.config.check import ALLOWED
from trainer.config.options import DataOptions, Options
from trainer.config.redact import without_secrets
from trainer.data.shards.transforms import build_stages
from trainer.errors import STOPPED, ConfigError, DataError, UnavailableError
from trainer.files import write_whole
from trainer.log import log
from trainer.plan import Plan
from trainer.process.environment import Place
from trainer.trainer import Trainer
from trainer.training_state import model_identity


def objects(config: dict[str, Any], allowed: tuple[str, ...] = ALLOWED) -> dict[str, Any]:
    """Build the arguments of `Trainer` (but for its place and name) that `config` describes."""
    options = settings(Options, config["trainer"])
    allow = (*allowed, *options.allow_targets)
    return {
        **{key: build(key, config[key], allow) for key in ("recipe", "optimizer", "schedule")},
        "callbacks": {name: build(f"callbacks.{name}", node, allow) for name, node in config["callbacks"].items()},
        **{key: config[key] for key in ("batch", "micro_batch", "accumulate")},
        "options": options,
        "data": settings(DataOptions, {**config["data"], **build_stages(config["data"], allow)}),
    }


def train(config: dict[str, Any], name: str, typed: list[str], place: Place | None = None) -> int:
    trainer = make_trainer(config, name, place)
    trainer.typed = typed
    os.environ.setdefault(
        "TORCH_FR_DUMP_TEMP_FILE", str(trainer.run_dir / "logs" / "nccl-rank")
    )  # torch adds its number
    if trainer.world == 1 and not os.isatty(0):  # else somebody may be in a debugger
        trainer.heartbeat.watch(2 * trainer.options.timeout_s)
    trainer.saver.settings |= flat(without_secrets(config))
    if trainer.rank == 0:
        trainer.begins = lambda: save_config(without_secrets(config), trainer.run_dir)
    describe(trainer, settings(NCCLOptions, config["nccl"]))
    trainer.fit()
    return ended(STOPPED if trainer.stop_reason == "signal" else 0)


def ended(code: int) -> int:
    """srun -K and mpirun send a signal as the first of them ends: all end with 75."""
    for number in (signal.SIGTERM, signal.SIGUSR1) if code == STOPPED else ():
        signal.signal(number, signal.SIG_IGN)
    return code


def make_trainer(config: dict[str, Any], name: str, place: Place | None) -> Trainer:
    """Raises:
    UnavailableError: in ranks that are started again, for what was in order when the run was planned.
    """
    planned = config.pop("planned", None)
    try:
        trainer = Trainer(**objects(config), place=place, name=name)
        if planned not in (None, found_data(trainer.plan)):
            raise DataError("recipe.data: is not what it was when the run was planned; bring that back, then resume")
    except (ConfigError, DataError) as error:
        if os.environ.get("ECHELON_ATTEMPT", "0") == "0":
            raise
        raise UnavailableError(str(error)) from None
    return trainer


def found_data(plan: Plan) -> list[str | None]:
    return [getattr(source, "fingerprint", None) for source in (plan.source, plan.validation)]


def save_config(config: dict[str, Any], run_dir: Path) -> None:
    path = run_dir / "config.yaml"
    try:
        write_whole(path, OmegaConf.to_yaml(OmegaConf.create(config)).encode())
    except OSError as error:
        if not path.exists():
            raise
        log.warning("%s stays as it was when the run began: %s", path, error.strerror)


def describe(trainer: Trainer, nccl: NCCLOptions) -> None:
    plan, parameters = trainer.plan, sum(p.numel() for p in trainer.module.parameters())
    log.info("run %s  %s", trainer.run_dir, shlex.join(trainer.typed or ()))
    log.info(
        "%d rank(s) on %s, %s, %s parameters; batch %d = %d rank(s) x %d micro-batch(es) x %s%d samples",
        trainer.world, trainer.device.type, trainer.precision.name, f"{parameters:,}",
        trainer.batch, trainer.world, plan.accumulate,
        "at most " if trainer.batch % (trainer.world * plan.accumulate) else "", plan.micro,
    )  # fmt: skip
    optimizer, group = model_identity(trainer)["optimizer"], trainer.optimizer.param_groups[0]
    log.info("optimizer %s, lr %g, weight decay %g", optimizer, trainer.peak_lr[0], group.get("weight_decay", 0.0))
    order = ", ".join(f"{name} ({callback.role.name})" for name, callback in trainer.callbacks.items())
    log.info("callbacks, in order: %s", order or "none")
    if words := in_words(nccl, trainer.ranks.backend, trainer.world, os.environ):
        log.info("%s", words)
