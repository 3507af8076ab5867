"""echelon resume RUN [KEY=VALUE...]: resumes a run from its stored config, with the overrides on top."""

import argparse
import re
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from trainer.annotated import as_yaml
from trainer.checkpoint.locate import CHECKPOINTED, checkpoints
from trainer.config.check import check
from trainer.config.compose import Job, compose
from trainer.config.folders import CONF, PRIMARY, config_dirs
from trainer.config.signature import UNTRUSTED, is_own
from trainer.errors import ConfigError, printable
from trainer.main import prepare, run, run_and_exit
from trainer.process.arguments import ArgumentParser
from trainer.run_dir import is_run, refuse_cut, refuse_unreadable, stored_config

WHOLE = ("optimizer", "schedule", "nccl")  # groups of which NAME replaces all keys


def resume(folder: Path, overrides: list[str]) -> int:
    for job in composed(folder, overrides):
        check(job.config)
        return run(job.config, folder.name, ["resume", str(folder), *job.argv], job.messages)
    return 0  # Hydra has shown something, for --cfg or --info


def composed(folder: Path, overrides: list[str]) -> list[Job]:
    """Compose the run's config with Hydra: the stored values, then the overrides."""
    from omegaconf import OmegaConf

    if {"-m", "--multirun"} & set(overrides):
        raise ConfigError("-m: a resume continues one run; leave -m out, and give one value to each key")
    stored, words = read(folder), []
    if not is_own(folder / "config.yaml"):
        given = {word.lstrip("+").partition("=")[0] for word in overrides}
        stored = distrusted(stored, given, f"RUN={printable(str(folder))}")
    for word in overrides:
        key, _, name = word.lstrip("+").partition("=")
        if key == "recipe":
            raise ConfigError(f"{word}: a resume keeps its recipe; leave this out, or start a new run with {word}")
        if key in WHOLE:
            stored.pop(key, None)
            word = f"+{key}={name}"
        words.append(word)
    hydra: Any = OmegaConf.select(OmegaConf.load(PRIMARY), "hydra")
    defaults: list[Any] = [{"callbacks": []}, "_self_"]
    defaults += [{f"override hydra/{name}": "none"} for name in ("job_logging", "hydra_logging")]
    searched = {"searchpath": [f"file://{CONF}"]}
    with tempfile.TemporaryDirectory(prefix="echelon-resume-") as place:
        primary = Path(place, "config.yaml")
        OmegaConf.save(OmegaConf.merge({"defaults": defaults}, stored, {"hydra": hydra}, {"hydra": searched}), primary)
        jobs = compose(words, [CONF, *config_dirs(overrides)], primary)
    for job in jobs:
        if (given := job.config["trainer"].get("run_dir")) != str(folder):  # it would begin without a checkpoint
            raise ConfigError(
                f"trainer.run_dir={as_yaml(given)}: a resume continues in the run's own folder {folder}; leave this "
                f"out, or give the whole command of the run with it and trainer.resume={folder}"
            )
    return jobs


def distrusted(stored: Any, given: Collection[str], key: str) -> Any:
    """Strip an untrusted config of its own permissions: such keys come from the command alone.

    `given` are the command's keys. Raises ConfigError if the config sets such a key and the command does not.
    """
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(stored)
    asked = {
        f"{section}.{name}": found
        for section, values in UNTRUSTED.items()
        for name, unset in values.items()
        if (found := plain[section].get(name, unset)) != unset and f"{section}.{name}" not in given
    }
    if asked:
        words = (f"'{name}={typed(value)}'" for name, value in asked.items())
        raise ConfigError(
            f"{key}: no run of yours has written this config.yaml here, or it was changed since, so it can't set "
            f"{', '.join(asked)}; if you trust it, add {' '.join(words)}"
        )
    return OmegaConf.merge(stored, UNTRUSTED)


def typed(value: Any) -> str:
    """Return a value in the syntax of an argument; VALUE for one that its config would resolve."""
    if isinstance(value, list):
        return f"[{','.join(map(typed, value))}]"
    text = printable(str(value)) if isinstance(value, str) else as_yaml(value)
    return "VALUE" if "${" in text else text if re.fullmatch(r"[\w./-]+", text) else f'"{text}"'


def read(folder: Path) -> Any:
    """Return the stored config, set to resume the run's newest checkpoint in the run's folder."""
    from omegaconf import OmegaConf

    key, file = f"RUN={printable(str(folder))}", folder / "config.yaml"
    refuse_unreadable(folder)
    if not folder.is_dir():
        raise ConfigError(f"{key}: is no folder; give the folder of a run, as in runs/NAME")
    if not file.exists() and checkpoints(folder, reads=True):
        raise ConfigError(f"{key}: holds checkpoints; give the folder of their run, as in runs/{folder.name}")
    begun = any((folder / name).exists() for name in (CHECKPOINTED, "metrics.jsonl", "summary.json"))
    if not file.exists() and is_run(folder) and not begun:
        raise ConfigError(f"{key}: this run was stopped before its first step; give the command of the run again")
    if not file.exists() and is_run(folder):
        raise ConfigError(
            f"{key}: this run has no config.yaml, which a Trainer made in Python does not write; resume in Python, "
            f"with Options(run_dir='{folder}', resume='auto')"
        )
    if not file.exists():
        raise ConfigError(f"{key}: has no config.yaml; give the folder of a run, as in runs/NAME")
    try:
        refuse_cut(stored := OmegaConf.load(stored_config(file)))
        if composing := sorted({"defaults", "hydra"} & stored.keys()):
            raise ConfigError(f"has {composing[0]}, which no run writes")
        return OmegaConf.merge(stored, {"trainer": {"run_dir": str(folder), "resume": "auto"}})
    except Exception as error:  # YAML's or OmegaConf's
        reason = printable(str(error).partition("\n")[0])
        raise ConfigError(f"{key}: config.yaml can't be read ({reason}); restore the file that the run wrote") from None


def main() -> None:
    parser = ArgumentParser(prog="echelon resume", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run, as in runs/NAME")
    parser.add_argument(
        "overrides", nargs=argparse.REMAINDER, metavar="KEY=VALUE", help="replaces a setting, as for the command"
    ).required = False  # argparse would name it among what is missing
    given = parser.parse_args()
    prepare()
    run_and_exit(lambda: resume(given.run, given.overrides))


if __name__ == "__main__":
    sys.exit(main())
