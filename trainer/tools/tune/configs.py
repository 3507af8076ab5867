"""Turns a config and a choice into the config of a trial, and refuses what can't run before it costs a trial."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.callback import Callback, Role
from trainer.checkpoint import locate
from trainer.composition import arrange
from trainer.config.batch import split_batch
from trainer.config.build import build, build_options
from trainer.config.check import LIBRARIES, check
from trainer.config.options import Options
from trainer.cost.workload import Choice
from trainer.errors import ConfigError
from trainer.plan import features, split_over
from trainer.tools.cost_model.read import defaults

KEPT = frozenset({"advice"})  # of the callbacks that show numbers: the others would write the terminal or other places
LOGGED = 5  # steps of a trial, or more
UNSEEN = (Role.MEASURE, Role.OBSERVE, Role.GUARD, Role.AVERAGE)  # by the cost model


def merge(config: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """Return a copy of the config with the callbacks and settings of the choice."""
    merged = copy.deepcopy(dict(config))
    for name, knobs in choice.callbacks.items():
        merged["callbacks"][name] = {**(merged["callbacks"].get(name) or defaults(name) or {}), **knobs}
    for key, value in choice.settings.items():
        *path, last = key.split(".")
        at = merged
        for part in path:
            at = at[part]
        at[last] = value
    return merged


def whole(config: Mapping[str, Any], world: int, cuda: bool) -> Choice:
    """Return everything that the cost model reads of a config, as a choice.

    `cuda`: ranks train on GPUs, where DDP's gradients are views of its buckets by default.
    """
    callbacks = {}
    for name, made in callbacks_of(config).items():
        if made.role not in UNSEEN:
            given, known = config["callbacks"][name], defaults(name) or {}
            if known.get("_target_") != given["_target_"]:  # from elsewhere
                known = {}
            callbacks[name] = {key: value for key, value in given.items() if known.get(key, given) != value}
    micro, _ = split_batch(config["batch"], ranks_with_data(config, world), config["micro_batch"], config["accumulate"])
    settings = {"micro_batch": micro, "data.workers": config["data"]["workers"]}
    ddp = config["trainer"]["ddp"]
    if (bucket := ddp["bucket_mib"]) is not None:
        settings["trainer.ddp.bucket_mib"] = bucket
    view = ddp["gradient_as_bucket_view"]
    settings["trainer.ddp.gradient_as_bucket_view"] = cuda if view is None else view
    if (algo := config["nccl"]["algo"]) is not None:
        settings["nccl.algo"] = algo
    return Choice(callbacks, settings, tuple(config["trainer"]["allow_targets"]))


def callbacks_of(config: Mapping[str, Any]) -> dict[str, Callback]:
    allow = (*LIBRARIES, *config["trainer"]["allow_targets"])
    return {name: build(f"callbacks.{name}", given, allow) for name, given in config["callbacks"].items()}


def ranks_with_data(config: Mapping[str, Any], world: int) -> int:
    """Return the number of ranks that read different samples."""
    return split_over(callbacks_of(config), world)


def refusal(config: dict[str, Any], world: int) -> str:
    """Return why a run of this config would be refused at its start; "" if nothing is known."""
    try:
        check(config)
        options = build_options(Options, config["trainer"])
        callbacks = arrange(callbacks_of(config), features(options))
        split_batch(config["batch"], split_over(callbacks, world), config["micro_batch"], config["accumulate"])
    except ConfigError as error:
        return str(error)
    return ""


def is_exact(config: Mapping[str, Any]) -> bool:
    """Return whether every callback preserves the numbers, up to rounding."""
    return all(callback.exact for callback in callbacks_of(config).values())


def find_start(config: Mapping[str, Any]) -> str | None:
    """Return the path of the checkpoint that `trainer.resume` means; None: the run begins at step 0."""
    options = config["trainer"]
    if options["resume"] is None:
        return None
    root = Path(options["checkpoint"]["dir"])
    run_dir = root / Path(options["run_dir"]).name if options["run_dir"] else None
    found = locate.resolve(options["resume"], root, run_dir, reads=True)
    return found and str(found.resolve())


def begun(config: Mapping[str, Any], checkpoint: str | None) -> dict[str, Any]:
    """Return a copy of the config that begins at this checkpoint, since a running job may write newer ones."""
    if checkpoint and not Path(checkpoint).exists():
        raise ConfigError(
            f"trainer.resume={config['trainer']['resume']}: the search began at {checkpoint}, which is gone; delete "
            "the search's journal, and give a checkpoint that stays"
        )
    return {**config, "trainer": {**config["trainer"], "resume": checkpoint}}


def of_trial(config: Mapping[str, Any], folder: Path, number: int, limit_s: float, steps: int) -> dict[str, Any]:
    """Return the config of a short run that writes into `folder` alone.

    The run logs often enough in its steps for `advice`, which judges two logged steps in a row.
    """
    trial = copy.deepcopy(dict(config))
    shown = [name for name, made in callbacks_of(config).items() if made.role == Role.OBSERVE and name not in KEPT]
    for name in shown:
        del trial["callbacks"][name]
    options = trial["trainer"]
    if options["resume"] is not None:
        options["accept"] = [*options["accept"], "callbacks"]  # other ones than the checkpoint's
    options["checkpoint"] |= {"dir": str(folder / "ckpt"), "every": None, "every_steps": None, "every_minutes": None}
    options["checkpoint"] |= {"keep_best": None, "keep_every": None}
    options |= {"run_dir": str(folder / f"run-{number}"), "validate_every": None, "check_replicas_every": None}
    options["log_every_steps"] = max(1, min(options["log_every_steps"], steps // LOGGED))
    options |= {"restarts": 0, "timeout_s": min(options["timeout_s"], limit_s)}
    return trial


def alone(config: Mapping[str, Any], world: int) -> dict[str, Any]:
    """Return the config of a run of one rank with a rank's part of the batch, data read in the training process."""
    own = copy.deepcopy(dict(config))
    roles = (Role.SPLIT, Role.SHARD, Role.REDUCE, Role.COMPRESS, Role.SYNC)
    own["callbacks"] = {
        name: own["callbacks"][name] for name, made in callbacks_of(config).items() if made.role not in roles
    }
    samples = config["batch"] // ranks_with_data(config, world)
    micro, accumulate = split_batch(samples, 1, config["micro_batch"], config["accumulate"])
    own |= {"batch": samples, "micro_batch": micro, "accumulate": accumulate}
    own["data"]["workers"] = 0
    own["trainer"] |= {"devices": "auto", "nodes": 1, "resume": None}
    return own
