"""From a checked config to a trained model: in this process, in ranks that it starts, or as one of a launcher's."""

import contextlib
import faulthandler
import json
import math
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import record

from trainer.checkpoint import commit
from trainer.checkpoint.resume import model_identity
from trainer.checkpoint.settings import flat
from trainer.config import ALLOWED, build, settings
from trainer.data.stages import build_stages
from trainer.distributed import count_gpus, pick_backend
from trainer.errors import ConfigError, DataError, UnavailableError, exit_code, told
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
from trainer.whole import write_whole


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
        again = {"resume": "auto"} if moved and commit.checkpoints(saved) else {}
        return OmegaConf.to_yaml(OmegaConf.create({**config, "trainer": options | again}))

    def further() -> str:
        return f"; go on with {go_on(typed, saved)}" if any(saved.glob("step-*")) else ""

    logs, still_s = run_dir / "logs", 2 * options["timeout_s"]
    return ended(Supervisor(resolved, typed, place, logs, further, restarts, still_s, start_s).run())


def objects(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Trainer` (but for its place and name) that `config` describes."""
    options = settings(Options, config["trainer"])
    allow = (*ALLOWED, *options.allow_targets)
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


def train_as_rank(descriptor: int, typed: list[str]) -> int:
    """A rank that a `Supervisor` started. What it fails with goes to the file that the supervisor reads."""
    faulthandler.enable()
    try:
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)  # at no position: all ranks share it
        os.close(descriptor)
        config: Any = OmegaConf.to_container(OmegaConf.create(text.decode()))
        log_file = Path(config["trainer"]["run_dir"], "logs", f"rank{os.environ['RANK']}.log")
        signal.signal(signal.SIGUSR2, lambda *_: None)  # so that `Signals` hears of it, too
        faulthandler.register(signal.SIGUSR2, log_file.open("a"), chain=True)  # all stacks, for the supervisor
        alone = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]  # else srun tells of another node's failure
        return (train if alone else attempt)(config, Path(config["trainer"]["run_dir"]).name, typed)
    except BaseException as error:
        text = told(error)
        if int(os.environ["RANK"]):
            print(text, file=sys.stderr)  # into this rank's log
        report = {"time": time.time(), "text": text, "code": exit_code(error), "in_collective": in_collective(error)}
        with contextlib.suppress(OSError):
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


def attempt(config: dict[str, Any], name: str, typed: list[str], place: Place | None = None) -> int:
    try:
        return train(config, name, typed, place)
    except Exception as error:
        if in_collective(error):
            time.sleep(8)  # a peer has failed before: the launcher tells of it, and ends this rank meanwhile
            if Signals.heard:  # or has asked it to end, when that was still obeyed
                os._exit(128 + signal.Signals[Signals.heard])
        raise


def in_collective(error: BaseException) -> bool:
    """Whether it may be a peer that has failed."""
    return isinstance(error, DistError) or "gloo/transport" in str(error)
