"""Restricts Hydra to composing configs: it imports no name from a config, runs no plugin, and writes no file."""

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.annotated import as_yaml
from trainer.errors import ConfigError, printable

BASIC = "hydra._internal.core_plugins.basic"  # the beginning of the names of Hydra's own launcher and sweeper
IN_RUN_DIR = "give trainer.run_dir=FOLDER, with -m as in 'trainer.run_dir=runs/${optimizer.lr}'"
NONE = {"version": 1, "root": None, "disable_existing_loggers": False}  # Hydra's logging `none`, as conf/config.yaml
LOGS = "the folder of the run has logs/"
UNREAD = {  # settings of Hydra's jobs: the value that Hydra or conf/config.yaml gives, and what to do instead
    "run.dir": (".", IN_RUN_DIR),
    "sweep.dir": (".", IN_RUN_DIR),
    "sweep.subdir": (".", IN_RUN_DIR),
    "output_subdir": (None, "config.yaml is in the folder of the run"),
    "job.chdir": (None, "go to the folder before the command"),
    "job.env_set": ({}, "set the variables in the shell"),
    "verbose": (False, LOGS),
}
NAMING = {  # settings of which Hydra imports the names, likewise
    "callbacks": ({}, "leave it out, and give '+callbacks=[NAME]' for a callback of Echelon's"),
    "job_logging": (NONE, f"leave it out: {LOGS}"),
    "hydra_logging": (NONE, f"leave it out: {LOGS}"),
}
SWEPT = {"_target_", "max_batch_size", "params"}  # keys of Hydra's sweeper
OF_USERS = ("main", "command-line", "hydra.searchpath")  # beginnings of the sources of a searchpath; others are Hydra's


@contextlib.contextmanager
def own_hydra() -> Iterator[None]:
    """Inside the block, refuse anything that would let Hydra do more than compose a config; see `refuse_jobs`.

    A folder `hydra_plugins` in the working folder is not loaded, because Hydra would run all of its modules. The
    sweeper's record of a multirun is not written: it would contain secrets, and replace a user's file.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_repository import ConfigRepository
    from hydra.core.plugins import Plugins

    with without_working_folder():
        Plugins.instance()
    from hydra._internal.core_plugins import basic_sweeper

    load, search = ConfigLoaderImpl.load_configuration, ConfigRepository.initialize_sources

    def loaded(self: ConfigLoaderImpl, *given: Any, **named: Any) -> Any:
        config = load(self, *given, **named)
        refuse_jobs(config.hydra)
        return config

    def searched(self: ConfigRepository, config_search_path: Any) -> None:
        refuse_packages(config_search_path)
        search(self, config_search_path)

    with (
        replaced(ConfigLoaderImpl, "load_configuration", loaded),
        replaced(ConfigRepository, "initialize_sources", searched),
        replaced(basic_sweeper, "OmegaConf", SimpleNamespace(save=lambda *_: None)),
    ):
        yield


@contextlib.contextmanager
def composed_once(words: list[str], places: list[Path]) -> Iterator[None]:
    """Keep Hydra from composing twice just to read hydra.mode, unless an argument or a file in `places` may set it."""
    from hydra._internal.hydra import Hydra

    files = (path.read_text(errors="replace") for place in places for path in place.glob("*.yaml"))
    once = not any("hydra" in text for text in itertools.chain(words, files))
    with replaced(Hydra, "get_mode", lambda *_, **__: None) if once else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    own = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, own)


def refuse_jobs(settings: Any) -> None:
    """Refuse settings of Hydra's jobs, which only compose a config: they change nothing, or import what they name.

    Values are compared unresolved, because Hydra resolves them later.
    """
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(settings)
    for kind in ("sweeper", "launcher"):
        node = plain.get(kind)
        target = str(node.get("_target_") if isinstance(node, Mapping) else node)
        if not target.startswith(BASIC):
            chosen_name = str(settings.runtime.choices.get(f"hydra/{kind}", "basic"))
            given = f"hydra.{kind}._target_={target}" if chosen_name == "basic" else f"hydra/{kind}={chosen_name}"
            raise ConfigError(
                f"{printable(given)}: this plugin would train nothing here; leave it out: -m runs one value after "
                "the other, and trainer.devices=N starts N ranks"
            )
        for key, value in node.items():
            if key not in (SWEPT if kind == "sweeper" else ("_target_",)) or is_nested(value):
                raise ConfigError(f"hydra.{kind}.{printable(str(key))}: changes nothing here; leave it out")
    for key, (unset, fix) in UNREAD.items():
        if (value := chosen(plain, key)) != unset:
            raise ConfigError(f"hydra.{key}={printable(as_yaml(value))}: changes nothing here; {fix}")
    for key, (unset, fix) in NAMING.items():
        if chosen(plain, key) != unset:
            raise ConfigError(f"hydra.{key}: may name code that Hydra would run; {fix}")


def chosen(plain: Any, key: str) -> Any:
    for part in key.split("."):
        plain = plain.get(part) if isinstance(plain, Mapping) else None
    return plain


def is_nested(value: Any) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return any(isinstance(each, Mapping | list) for each in inner)


def refuse_packages(search_path: Any) -> None:
    """Refuse config sources that are not folders, because Hydra would import a package to search it."""
    for place in search_path.get_path():
        scheme, separator, _ = str(place.path).partition("://")
        if separator and scheme != "file" and str(place.provider).startswith(OF_USERS):
            raise ConfigError(
                f"hydra.searchpath=[{printable(place.path)}]: would import a package to look for configs; give "
                "--config-dir FOLDER"
            )


@contextlib.contextmanager
def without_working_folder() -> Iterator[None]:
    whole, here = sys.path[:], os.getcwd()
    sys.path[:] = [folder for folder in whole if os.path.abspath(folder) != here]
    try:
        yield
    finally:
        sys.path[:] = whole
