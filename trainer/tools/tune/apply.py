"""Rolls a result out to a running job: a request in its folder, if a resume with the result would be accepted."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainer.callback import Role
from trainer.checkpoint.compare import flat
from trainer.checkpoint.locate import checkpoints
from trainer.checkpoint.lock import CHECKPOINTED, is_running
from trainer.checkpoint.manifest import Damaged, verify
from trainer.config.build import build_options
from trainer.config.options import Options
from trainer.config.redact import redact, redacted_keys
from trainer.errors import HIDDEN, ConfigError, printable
from trainer.plan import stateful
from trainer.process import handover
from trainer.tools.cost_model.workload import Choice
from trainer.tools.tune.configs import callbacks_of, merge, refusal

SHOWING = (Role.MEASURE, Role.OBSERVE)
PARTS = ("batch", "micro_batch", "accumulate")
WAY_OUT = "leave tune.apply out, and give +tuned=NAME to the job's next start"


def find_run(config: dict[str, Any], argv: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the config of the job that is to take the result over.

    Args:
        argv: The arguments of the search, which are those of the job.

    Raises:
        ConfigError: The config names no run, one that has ended, one that trains something else, or one that could not
            take a result over.
    """
    run_dir = config["trainer"]["run_dir"]
    if run_dir is None:
        raise ConfigError("tune.apply=true: no run is named; give trainer.run_dir=runs/NAME of the running job")
    job, other = read_job(Path(run_dir))
    if not is_running(Path(run_dir)):
        raise ConfigError(
            f"trainer.run_dir={run_dir}: no process writes this run, and tune.apply=true needs a running job; leave it "
            "out, and go on with +tuned=NAME"
        )
    own = training(redact(config))
    for key in sorted(own.keys() | other.keys()):
        if own.get(key) != other.get(key):
            raise ConfigError(
                f"{key}={own.get(key)}: {run_dir} has {other.get(key)}, and a result is proven for one config; give "
                "tune.apply=true with the arguments of the running job"
            )
    words = [word.partition("=")[0].lstrip("+") for word in argv if HIDDEN in word]
    if hidden := [*words, *redacted_keys(job)]:
        raise ConfigError(f"{hidden[0]}={HIDDEN}: is hidden, and the job's next command would lack it; {WAY_OUT}")
    if not saves_again(job, manifest_of(Path(run_dir)).get("step", 0)):
        raise ConfigError(
            f"trainer.run_dir={run_dir}: this job makes no further checkpoint before its last step, and takes a result "
            f"over at one; {WAY_OUT}"
        )
    return Path(run_dir), job


def saves_again(job: dict[str, Any], step: int) -> bool:
    """Return whether the job may make a checkpoint after this step and before its last one."""
    options = build_options(Options, job["trainer"])
    given = options.checkpoint
    if given.every or given.every_minutes or given.keep_best:
        return True
    if not given.every_steps:
        return False
    return options.max_steps is None or (step // given.every_steps + 1) * given.every_steps < options.max_steps


def read_job(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config of a run, and its part that decides what is computed.

    Raises:
        ConfigError: There is no config, or one that can't be read.
    """
    key = f"trainer.run_dir={run_dir}"
    try:
        job: Any = OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml"))
        return job, training(job)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{key}: holds no run; tune.apply=true needs that of the running job") from None
    except ConfigError:
        raise
    except Exception as error:  # the system's, YAML's or OmegaConf's; a file that was cut off lacks keys
        lacks = f"no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        reason = printable(getattr(error, "strerror", None) or lacks)
        raise ConfigError(f"{key}: config.yaml can't be read ({reason}); {WAY_OUT}") from None


def training(config: dict[str, Any]) -> dict[str, Any]:
    """Return the dotted settings that decide what is computed, and the callbacks that take part in it."""
    made = callbacks_of(config)
    callbacks = {name: config["callbacks"][name] for name, each in made.items() if each.role not in SHOWING}
    found = flat({**config, "callbacks": callbacks, "nccl": {}}) | {name: config[name] for name in PARTS}
    return {"+callbacks": sorted(callbacks), "trainer.precision": config["trainer"]["precision"], **found}


def hand_over(config: dict[str, Any], argv: Sequence[str], choice: Choice, world: int, name: str, folder: Path) -> str:
    """Ask the run to take the result over at its next checkpoint; return what was done, in words."""
    run_dir = Path(config["trainer"]["run_dir"])
    if not is_running(run_dir):
        return f"{run_dir} has ended; go on with +tuned={name}"
    try:
        _, job = find_run(config, argv)  # once more: it may have been started anew since
    except ConfigError as error:
        return f"{run_dir} goes on as it is: {error}"
    if (ranks := manifest_of(run_dir).get("world")) not in (None, world):
        why = f"its newest checkpoint is of {ranks} rank(s), and the result is proven for {world}"
        return f"{run_dir} goes on as it is: {why}"
    if why := refusal(merge(job, choice), world):
        return f"{run_dir} goes on as it is: it would refuse the result ({why})"
    more = state_keepers(merge(job, choice)) - state_keepers(job)
    if more and "callbacks" not in job["trainer"]["accept"]:
        return (
            f"{run_dir} goes on as it is: a resume refuses new callbacks with state ({', '.join(sorted(more))}); "
            f"stop it, then go on with +tuned={name} 'trainer.accept=[callbacks]'"
        )
    try:
        handover.ask(run_dir, name, folder, list(choice.settings), world)
    except OSError as error:
        return f"{run_dir} goes on as it is: {error.filename or run_dir}: {error.strerror}"
    return f"{run_dir} takes it over at its next checkpoint, unless it ends before"


def manifest_of(run_dir: Path) -> dict[str, Any]:
    """Return the manifest of the run's newest checkpoint; empty if none can be read."""
    with suppress(OSError, IndexError, Damaged):
        saved = Path((run_dir / CHECKPOINTED).read_text())
        return verify(checkpoints(saved, reads=True)[-1], hashes=False)
    return {}


def state_keepers(config: dict[str, Any]) -> set[str]:
    """Return the callbacks that a resume compares."""
    return set(stateful(callbacks_of(config)))
