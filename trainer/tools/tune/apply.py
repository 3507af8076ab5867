"""Rolls a result out to a running job: a request in its folder, if a resume with the result would be accepted."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainer.callback import Role, overrides
from trainer.errors import ConfigError
from trainer.process import handover
from trainer.tools.cost_model.workload import Choice
from trainer.tools.tune.configs import callbacks_of, merge, refusal


def find_run(config: dict[str, Any]) -> Path:
    """Return the folder of the job that is to take the result over.

    Raises:
        ConfigError: The config names no run.
    """
    run_dir = config["trainer"]["run_dir"]
    if run_dir is None:
        raise ConfigError("tune.apply=true: no run is named; give trainer.run_dir=runs/NAME of the running job")
    if not (Path(run_dir) / "config.yaml").exists():
        raise ConfigError(f"trainer.run_dir={run_dir}: holds no run; tune.apply=true needs that of the running job")
    return Path(run_dir)


def hand_over(run_dir: Path, choice: Choice, world: int, name: str, folder: Path) -> str:
    """Ask the run to take the result over at its next checkpoint; return what was done, in words."""
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
        handover.ask(run_dir, name, folder, list(choice.settings))
    except OSError as error:
        return f"{run_dir} goes on as it is: {error.filename or run_dir}: {error.strerror}"
    return f"{run_dir} takes it over at its next checkpoint"


def state_keepers(config: dict[str, Any]) -> set[str]:
    """Return the callbacks that a resume compares, as `Plan.identity` lists them."""
    return {
        name
        for name, callback in callbacks_of(config).items()
        if callback.role not in (Role.MEASURE, Role.OBSERVE) or overrides(callback, "state_dict")
        if not overrides(callback, "distribute")
    }
