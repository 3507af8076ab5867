"""Prints how to stop a running job and resume it with the result, provided that the resume would be accepted."""

import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainer.callback import Role
from trainer.checkpoint.compare import flat
from trainer.checkpoint.locate import checkpoints, noted_in
from trainer.checkpoint.lock import is_running
from trainer.checkpoint.manifest import Damaged, verify
from trainer.checks.plan import stateful
from trainer.config.signature import is_own
from trainer.cost.workload import Choice
from trainer.errors import ConfigError, printable
from trainer.process.calling import echelon
from trainer.redact import redact
from trainer.run_dir import refuse_cut, stored_config
from trainer.tools.tune.configs import callbacks_of, merge, refusal

SHOWING = (Role.MEASURE, Role.OBSERVE)
PARTS = ("batch", "micro_batch", "accumulate")
WAY_OUT = "leave tune.apply out, and give +tuned=NAME to the job's next start"


def refuse_other_job(config: dict[str, Any]) -> None:
    """Refuse to search for any job other than the running one that the config names."""
    run_dir = config["trainer"]["run_dir"]
    if run_dir is None:
        raise ConfigError("tune.apply=true: no run is named; give trainer.run_dir=runs/NAME of the running job")
    other, _ = read_job(Path(run_dir), config["trainer"]["allow_targets"])
    if not is_running(Path(run_dir)):
        raise ConfigError(
            f"trainer.run_dir={run_dir}: no process writes this run, and tune.apply=true needs a running job; leave it "
            "out, and resume with +tuned=NAME"
        )
    own = training(redact(config))
    for key in sorted(own.keys() | other.keys()):
        if own.get(key) != other.get(key):
            raise ConfigError(
                f"{key}={own.get(key)}: {run_dir} has {other.get(key)}, and a result is proven for one config; give "
                "tune.apply=true with the arguments of the running job"
            )


def read_job(run_dir: Path, allow: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what decides the numbers of a run, and its whole config.

    `allow` are the packages that the config may name if no run of this user has written it.
    """
    key, file = f"trainer.run_dir={run_dir}", run_dir / "config.yaml"
    try:
        job: Any = OmegaConf.to_container(OmegaConf.load(stored_config(file)))
        refuse_cut(job)
        if not is_own(file):
            job["trainer"]["allow_targets"] = allow
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{key}: holds no run; tune.apply=true needs that of the running job") from None
    except Exception as error:  # the system's, YAML's or OmegaConf's
        reason = printable(getattr(error, "strerror", None) or str(error).partition("\n")[0])
        raise ConfigError(f"{key}: config.yaml can't be read ({reason}); {WAY_OUT}") from None
    return training(job), job


def training(config: dict[str, Any]) -> dict[str, Any]:
    """Return the dotted settings that decide what is computed, and the callbacks involved."""
    made = callbacks_of(config)
    callbacks = {name: config["callbacks"][name] for name, each in made.items() if each.role not in SHOWING}
    found = flat({**config, "callbacks": callbacks, "nccl": {}}) | {name: config[name] for name in PARTS}
    return {"+callbacks": sorted(callbacks), "trainer.precision": config["trainer"]["precision"], **found}


def switch(config: dict[str, Any], choice: Choice, world: int, name: str, folder: Path) -> str:
    """Return how to stop the job and resume it with the result, or why a resume would refuse it.

    The job keeps its own settings, which need not be those that the search was given.
    """
    run_dir = Path(config["trainer"]["run_dir"])
    try:
        _, job = read_job(run_dir, config["trainer"]["allow_targets"])
    except ConfigError as error:
        return f"{run_dir} keeps its config: {error}"
    if (ranks := manifest_of(run_dir).get("world")) not in (None, world):
        return f"{run_dir} keeps its config: its newest checkpoint is of {ranks} rank(s), and the result of {world}"
    if why := refusal(merge(job, choice), world):
        return f"{run_dir} keeps its config: a resume would refuse the result ({why})"
    words = ["resume", str(run_dir), "--config-dir", str(folder.resolve()), f"+tuned={name}"]
    after, before = (set(stateful(callbacks_of(each))) for each in (merge(job, choice), job))
    if after - before and "callbacks" not in job["trainer"]["accept"]:
        words.append("trainer.accept=[callbacks]")  # a resume refuses new callbacks with state
    return f"stop {run_dir} by SIGTERM, then: {shlex.join([*echelon(), *words])}"


def manifest_of(run_dir: Path) -> dict[str, Any]:
    """Return the manifest of the run's newest checkpoint; {} if none can be read."""
    with suppress(OSError, IndexError, Damaged):
        return verify(checkpoints(noted_in(run_dir) or run_dir, reads=True)[-1], hashes=False)
    return {}
