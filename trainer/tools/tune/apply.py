"""Rolls a result out to a running job: a request in its folder, if a resume with the result would be accepted."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainer.callback import Role
from trainer.checkpoint.compare import flat
from trainer.checkpoint.locate import checkpoints
from trainer.checkpoint.lock import CHECKPOINTED, is_running
from trainer.checkpoint.manifest import Damaged, verify
from trainer.config.redact import redact
from trainer.errors import ConfigError
from trainer.plan import stateful
from trainer.process import handover
from trainer.tools.cost_model.workload import Choice
from trainer.tools.tune.configs import callbacks_of, merge, refusal

SHOWING = (Role.MEASURE, Role.OBSERVE)
PARTS = ("batch", "micro_batch", "accumulate")


def find_run(config: dict[str, Any]) -> Path:
    """Return the folder of the job that is to take the result over.

    Raises:
        ConfigError: The config names no run, one that has ended, or one that trains something else.
    """
    run_dir = config["trainer"]["run_dir"]
    if run_dir is None:
        raise ConfigError("tune.apply=true: no run is named; give trainer.run_dir=runs/NAME of the running job")
    if not (Path(run_dir) / "config.yaml").exists():
        raise ConfigError(f"trainer.run_dir={run_dir}: holds no run; tune.apply=true needs that of the running job")
    if not is_running(Path(run_dir)):
        raise ConfigError(
            f"trainer.run_dir={run_dir}: no process writes this run, and tune.apply=true needs a running job; leave it "
            "out, and go on with +tuned=NAME"
        )
    job: Any = OmegaConf.to_container(OmegaConf.load(Path(run_dir) / "config.yaml"))
    own, other = training(redact(config)), training(job)
    for key in sorted(own.keys() | other.keys()):
        if own.get(key) != other.get(key):
            raise ConfigError(
                f"{key}={own.get(key)}: {run_dir} has {other.get(key)}, and a result is proven for one config; give "
                "tune.apply=true with the arguments of the running job"
            )
    return Path(run_dir)


def training(config: dict[str, Any]) -> dict[str, Any]:
    """Return the dotted settings that decide what is computed, and the callbacks that take part in it."""
    made = callbacks_of(config)
    callbacks = {name: config["callbacks"][name] for name, each in made.items() if each.role not in SHOWING}
    found = flat({**config, "callbacks": callbacks, "nccl": {}}) | {name: config[name] for name in PARTS}
    return {"+callbacks": sorted(callbacks), "trainer.precision": config["trainer"]["precision"], **found}


def hand_over(run_dir: Path, choice: Choice, world: int, name: str, folder: Path) -> str:
    """Ask the run to take the result over at its next checkpoint; return what was done, in words."""
    if not is_running(run_dir):
        return f"{run_dir} has ended; go on with +tuned={name}"
    if (ranks := ranks_of(run_dir)) not in (None, world):
        why = f"its newest checkpoint is of {ranks} rank(s), and the result is proven for {world}"
        return f"{run_dir} goes on as it is: {why}"
    config: Any = OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml"))
    if why := refusal(merge(config, choice), world):
        return f"{run_dir} goes on as it is: it would refuse the result ({why})"
    more = state_keepers(merge(config, choice)) - state_keepers(config)
    if more and "callbacks" not in config["trainer"]["accept"]:
        return (
            f"{run_dir} goes on as it is: a resume refuses new callbacks with state ({', '.join(sorted(more))}); "
            f"stop it, then go on with +tuned={name} 'trainer.accept=[callbacks]'"
        )
    try:
        handover.ask(run_dir, name, folder, list(choice.settings), world)
    except OSError as error:
        return f"{run_dir} goes on as it is: {error.filename or run_dir}: {error.strerror}"
    return f"{run_dir} takes it over at its next checkpoint"


def ranks_of(run_dir: Path) -> int | None:
    """Return the number of ranks that wrote the run's newest checkpoint; None if none can be read."""
    with suppress(OSError, IndexError, Damaged):
        saved = Path((run_dir / CHECKPOINTED).read_text())
        return verify(checkpoints(saved, reads=True)[-1], hashes=False)["world"]
    return None


def state_keepers(config: dict[str, Any]) -> set[str]:
    """Return the callbacks that a resume compares."""
    return set(stateful(callbacks_of(config)))
