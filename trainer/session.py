"""Trains a model from a checked config, in this process."""

import json
import os
import re
import shlex
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from trainer.checkpoint.compare import flat, plain
from trainer.comm.nccl import NCCLOptions, in_words
from trainer.comm.ranks import Ranks
from trainer.config.build import build, build_options
from trainer.config.check import TUNED, split_groups
from trainer.config.folders import naming_defaults
from trainer.config.options import DataOptions, Options
from trainer.config.signature import sign
from trainer.config.targets import LIBRARIES
from trainer.config.tuned import Tuned, cpu_name, differences
from trainer.context import Command
from trainer.data.shards.transforms import build_stages
from trainer.errors import STOPPED, ConfigError, DataError, UnavailableError
from trainer.files import write_whole
from trainer.log import log
from trainer.loop import Loop
from trainer.optim.groups import WithGroups
from trainer.plan import RunSpec
from trainer.process.environment import Place
from trainer.process.exit import end_at_once
from trainer.redact import redact, remember
from trainer.rng import RECIPE_DATA, mix, seed_all
from trainer.timeouts import STILL
from trainer.trainer import Trainer

Report = Callable[[BaseException], None]
# Variables by which libraries choose kernels, and thus the order of sums, except those for the number of threads.
ARITHMETIC = re.compile(
    "(MKL|OPENBLAS|BLIS|DNNL|ONEDNN)_(?!NUM_THREADS|VERBOSE).*|ATEN_CPU_CAPABILITY|NVIDIA_TF32_OVERRIDE"
    "|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|CUDNN_.*|NCCL_(ALGO|PROTO|NVLS_ENABLE)"
)
OF_RECIPE = ("trainer.optim.factories.of_recipe", "trainer.optim.schedule.OfRecipe")


def build_components(config: dict[str, Any], allowed: tuple[str, ...] = LIBRARIES) -> dict[str, Any]:
    """Build the arguments of `Trainer` that `config` describes: all except `place`, `name` and `command`."""
    remember(config)
    options = build_options(Options, config["trainer"])
    allow = (*allowed, *options.allow_targets)
    groups, optimizer = split_groups(config["optimizer"])
    # Seeded so that a constructor which splits data at random does so alike on all ranks, and after a resume.
    seed_all(mix(options.seed, RECIPE_DATA))
    recipe = build("recipe", config["recipe"], allow)
    return {
        "recipe": recipe,
        "schedule": build_or_own("schedule", config["schedule"], allow, recipe),
        "optimizer": WithGroups(build_or_own("optimizer", optimizer, allow, recipe), groups or ()),
        "callbacks": {name: build(f"callbacks.{name}", node, allow) for name, node in config["callbacks"].items()},
        **{key: config[key] for key in ("batch", "micro_batch", "accumulate")},
        "options": options,
        "data": build_options(DataOptions, {**config["data"], **build_stages(config["data"], allow)}),
    }


def build_or_own(key: str, node: Mapping[str, Any], allow: tuple[str, ...], recipe: Any) -> Any:
    """Build the optimizer or the schedule; for `optimizer=recipe` or `schedule=recipe`, return the recipe's own.

    Raises:
        ConfigError: The recipe has none.
    """
    if node["_target_"] not in OF_RECIPE:
        return build(key, node, allow)
    if not hasattr(recipe, key):
        raise ConfigError(
            f"{key}=recipe: {type(recipe).__name__} has no {key} of its own; choose another {key}, see --help"
        )
    return getattr(recipe, key)


def train(
    config: dict[str, Any],
    name: str,
    argv: list[str],
    place: Place | None = None,
    spec: RunSpec | None = None,
    on_error: Report = lambda error: None,
    end_failed: Report = end_at_once,
) -> int:
    """Train to the end, and return the exit code.

    Args:
        spec: The run's decisions, if a launcher made them.
        on_error: Called with the error of a failed run, before the clean-up.
        end_failed: Called after `on_error` if the device has failed, to end the process before torch frees pinned
            memory, which would abort it.
    """
    command = Command(
        argv, spec, plain(flat(redact(config))), {},
        lambda run_dir: save_config(redact(config), run_dir), on_error, end_failed,
    )  # fmt: skip
    with naming_defaults(argv):
        trainer = make_trainer(config, place=place, name=name, command=command)
    command.machine.update(arithmetic())  # after threads are bound and the device is chosen
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(trainer.run_dir / "logs" / "nccl-rank"))  # torch adds the rank
    if trainer.world == 1 and not os.isatty(0):  # at a terminal, a user may be in a debugger
        stderr = os.fdopen(os.dup(2), "a")  # a socket can't be opened by its path
        trainer.heartbeat.watch(STILL * trainer.options.timeout_s, lambda: None, stderr)
    if not trainer.ended:
        describe(trainer.loop, build_options(NCCLOptions, config["nccl"]))
    tuned = config.get(TUNED)
    if tuned and (other := differences(tuned, machine(trainer.ranks, tuned["link"]))):
        log.warning("+tuned: was measured on another machine (%s); measure here by echelon tune", other)
    trainer.fit()
    return end(STOPPED if trainer.stop_reason == "signal" else 0)


def machine(ranks: Ranks, link: str) -> Tuned:
    """Describe this machine in the form that `trainer.tools.tune` stores with a result."""
    gpu = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else None
    return Tuned(cpu_name(), gpu, ranks.world, ranks.place.local_world, link)


def end(code: int) -> int:
    """Return `code`. If it is 75, ignore the signals with which `srun -K` and mpirun kill the first rank's peers."""
    for number in (signal.SIGTERM, signal.SIGUSR1) if code == STOPPED else ():
        signal.signal(number, signal.SIG_IGN)
    return code


def make_trainer(config: dict[str, Any], **run: Any) -> Trainer:
    """Build the trainer that `config` describes, with the further arguments `run`.

    Raises:
        UnavailableError: A restarted rank refuses a setting or data that were valid when the run was planned.
    """
    try:
        return Trainer(**build_components(config), **run)
    except (ConfigError, DataError) as error:
        if os.environ.get("ECHELON_ATTEMPT", "0") == "0":
            raise
        raise UnavailableError(str(error)) from None


def arithmetic() -> dict[str, Any]:
    """Return the properties of this machine that affect the bits of a sum. A resume logs differences."""
    cuda = {"machine.gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    variables = {f"machine.{name}": value for name, value in os.environ.items() if ARITHMETIC.fullmatch(name)}
    own = {"machine.threads": torch.get_num_threads(), "machine.cpu": torch.backends.cpu.get_cpu_capability()}
    return {**own, **cuda, **variables}


def save_config(config: dict[str, Any], run_dir: Path) -> None:
    path = run_dir / "config.yaml"
    literal = json.loads(json.dumps(config).replace("${", r"\\${"))  # a resolved value must not be interpolated again
    try:
        write_whole(path, OmegaConf.to_yaml(OmegaConf.create(literal)).encode())
    except OSError as error:
        if not path.exists():
            raise
        log.warning("%s: can't be replaced, and stays as at the run's first start: %s", path, error.strerror)
    else:
        sign(path)


def describe(loop: Loop, nccl: NCCLOptions) -> None:
    """Log the run, its model's size, device, batch, optimizer and callbacks."""
    trainer, plan = loop.context, loop.plan
    parameters = sum(p.numel() for p in trainer.module.parameters())
    data_world = trainer.strategy.data_world
    readers = "rank(s)" if data_world == trainer.world else "replica(s)"
    log.info("run %s  %s", trainer.run_dir, shlex.join(trainer.command.argv or ()))
    log.info(
        "%d rank(s) on %s, %s, %s parameters; batch %d = %d %s x %d micro-batch(es) x %s%d samples",
        trainer.world, trainer.device.type, trainer.precision.label, f"{parameters:,}",
        trainer.batch, data_world, readers, plan.accumulate,
        "at most " if trainer.batch % (data_world * plan.accumulate) else "", plan.micro,
    )  # fmt: skip
    optimizer, group = loop.checkpointer.model_identity()["optimizer"], trainer.optimizer.param_groups[0]
    log.info(
        "optimizer %s, lr %g, weight decay %g, schedule %s",
        optimizer, loop.rates.peaks[0], group.get("weight_decay", 0.0), plan.rate.name,
    )  # fmt: skip
    log.info("callbacks, in order: %s", ", ".join(trainer.callbacks) or "none")
    if trainer.ranks.gpus_hidden():
        log.warning(
            "srun --gpus-per-task=1: each rank sees its own GPU alone, so NCCL may copy through the host "
            "(NVIDIA/nccl#1066); use --gpus-per-node"
        )
    if words := in_words(nccl, trainer.ranks.backend, trainer.world, os.environ):
        log.info("%s", words)
