"""From a checked config to a trained model: in this process, in ranks that it starts, or as one of a launcher's."""

import faulthandler
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import record

from trainer.checkpoint import commit
from trainer.checkpoint.resume import model_identity
from trainer.config import ALLOWED, build, settings
from trainer.distributed import count_gpus, pick_backend
from trainer.errors import ConfigError, exit_code, told
from trainer.launch import STOPPED, Place, let_first_tell
from trainer.nccl import NCCLOptions, in_words
from trainer.options import DataOptions, Options
from trainer.plan import Plan
from trainer.precision import Precision
from trainer.run import log, make_run_dir, show_log
from trainer.secret import without_secrets
from trainer.signals import Signals
from trainer.summary import go_on
from trainer.supervisor import Supervisor
from trainer.trainer import Trainer


def start(config: dict[str, Any], name: str, typed: list[str], place: Place) -> int:
    """The exit code: 0, or 75 where a signal stopped the run."""
    if place.launcher:
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
    return start_ranks(config, name, typed, devices)


def start_ranks(config: dict[str, Any], name: str, typed: list[str], devices: int) -> int:
    """Plans the run as a rank would, so that what can't work ends here and data is prepared once; then starts them."""
    show_log(0)
    made = objects(config)
    del made["optimizer"]
    plan, options = Plan(**made, world=devices, rank=0, each=lambda value: [value]), made["options"]
    run_dir = make_run_dir(plan, name)
    found = {"run_dir": str(run_dir), "devices": devices} | ({"resume": str(plan.resumed)} if plan.resumed else {})
    del made, plan  # the ranks open the data themselves
    saved = Path(config["trainer"]["checkpoint"]["dir"]) / run_dir.name
    with tempfile.TemporaryDirectory(prefix="echelon-") as private:

        def arguments(moved: bool) -> list[str]:
            again = {"resume": "auto"} if moved and commit.checkpoints(saved) else {}
            file = save_config({**config, "trainer": config["trainer"] | found | again}, Path(private))
            return ["--resolved", str(file), *typed]

        def further() -> str:
            return f"; go on with {go_on(typed, saved)}" if any(saved.glob("step-*")) else ""

        still_s = 2 * options.timeout_s
        return Supervisor(arguments, devices, run_dir / "logs", further, options.restarts, still_s).run()


def objects(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Trainer` (but for its place and name) that `config` describes."""
    options = settings(Options, config["trainer"])
    allow = (*ALLOWED, *options.allow_targets)
    return {
        **{key: build(key, config[key], allow) for key in ("recipe", "optimizer", "schedule")},
        "callbacks": {name: build(f"callbacks.{name}", node, allow) for name, node in config["callbacks"].items()},
        **{key: config[key] for key in ("batch", "micro_batch", "accumulate")},
        "options": options,
        "data": settings(DataOptions, config["data"]),
    }


def train(config: dict[str, Any], name: str, typed: list[str], place: Place | None = None) -> int:
    trainer = Trainer(**objects(config), place=place, name=name)
    trainer.typed = typed
    if trainer.rank == 0:
        trainer.begins = lambda: save_config(without_secrets(config), trainer.run_dir)
    describe(trainer, settings(NCCLOptions, config["nccl"]))
    trainer.fit()
    if trainer.stop_reason != "signal":
        return 0
    for number in (
        signal.SIGTERM,
        signal.SIGUSR1,
    ):  # srun -K and mpirun send one as the first rank ends: all end with 75
        signal.signal(number, signal.SIG_IGN)
    return STOPPED


def save_config(config: dict[str, Any], run_dir: Path) -> Path:
    path = run_dir / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    return path


def describe(trainer: Trainer, nccl: NCCLOptions) -> None:
    plan, parameters = trainer.plan, sum(p.numel() for p in trainer.module.parameters())
    log.info("run %s  %s", trainer.run_dir, shlex.join(trainer.typed or ()))
    log.info(
        "%d rank(s) on %s, %s, %s parameters; batch %d = %d rank(s) x %d micro-batch(es) x %d samples",
        trainer.world, trainer.device.type, trainer.precision.name, f"{parameters:,}",
        trainer.batch, trainer.world, plan.accumulate, plan.micro,
    )  # fmt: skip
    optimizer, group = model_identity(trainer)["optimizer"], trainer.optimizer.param_groups[0]
    log.info("optimizer %s, lr %g, weight decay %g", optimizer, trainer.peak_lr[0], group.get("weight_decay", 0.0))
    order = ", ".join(f"{name} ({callback.role.name})" for name, callback in trainer.callbacks.items())
    log.info("callbacks, in order: %s", order or "none")
    if words := in_words(nccl, trainer.ranks.backend, trainer.world, os.environ):
        log.info("%s", words)


def train_as_rank(file: Path, typed: list[str]) -> int:
    """A rank that a `Supervisor` started. What it fails with goes to the file that the supervisor reads."""
    faulthandler.enable()
    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(file))
        log_file = Path(config["trainer"]["run_dir"], "logs", f"rank{os.environ['RANK']}.log")
        faulthandler.register(signal.SIGUSR2, log_file.open("a"))  # all stacks, for the supervisor
        return train(config, Path(config["trainer"]["run_dir"]).name, typed)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        text = told(error)
        if int(os.environ["RANK"]):
            print(text, file=sys.stderr)  # into this rank's log
        report = {"time": time.time(), "text": text, "code": exit_code(error)}
        Path(os.environ["ECHELON_ERROR_FILE"]).write_text(json.dumps(report))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(report["code"])  # an orderly end may wait for peers that wait for this rank


def train_under_launcher(config: dict[str, Any], name: str, typed: list[str], place: Place) -> int:
    """A rank that torchrun, mpirun or srun started. torchrun prints the first failure of all, as `record` noted it."""
    terminal = os.dup(2)
    torchrun = "TORCHELASTIC_ERROR_FILE" in os.environ  # else nobody prints what `record` noted
    try:
        return (record(attempt) if torchrun else attempt)(config, name, typed, place) or 0
    except Exception as error:
        text = told(error)
        if not os.path.sameopenfile(terminal, 2):
            print(text, file=sys.stderr)  # into this rank's log
        if not torchrun or text.startswith("echelon: "):
            let_first_tell()
            os.write(terminal, f"{text}\n".encode())
        sys.stdout.flush()
        os._exit(exit_code(error))


def attempt(config: dict[str, Any], name: str, typed: list[str], place: Place) -> int:
    try:
        return train(config, name, typed, place)
    except Exception as error:
        if isinstance(error, DistError) or "gloo/transport" in str(error):
            time.sleep(5)  # a peer has failed before: the launcher tells of it, and ends this rank meanwhile
            if Signals.heard:  # or has asked it to end, when that was still obeyed
                os._exit(128 + signal.Signals[Signals.heard])
        raise
