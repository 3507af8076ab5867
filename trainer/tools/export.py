"""echelon export CHECKPOINT FOLDER [KEY=VALUE...]: exports a checkpoint like the end of a run."""

import pkgutil
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from trainer import loggers, monitors
from trainer.callback import Role
from trainer.checkpoint.manifest import Damaged, verify
from trainer.checkpoint.parts import open_parts, read_all
from trainer.checkpoint.pretrained import put_weights
from trainer.checkpoint.serialize import load_state
from trainer.checks.plan import refuse_other_manifests, short
from trainer.config.check import check
from trainer.config.options import Options
from trainer.config.signature import UNTRUSTED, is_own
from trainer.config.targets import locate
from trainer.data.opening import open_source
from trainer.errors import ConfigError, printable
from trainer.files import no_folders_if_refused, usual_permissions
from trainer.parallel.meta import on_host
from trainer.process.arguments import ArgumentParser
from trainer.process.exit import run_guarded
from trainer.redact import redacted_keys
from trainer.run_dir import find_checkpoint, is_run, make_writable, refuse_cut, stored_config
from trainer.session import build_components

# An export trains nothing, so the optimizer and the schedule of the run's config are neither checked nor built.
UNTRAINED = {
    "optimizer": {"_target_": "trainer.optim.factories.adamw", "_partial_": True},
    "schedule": {"_target_": "trainer.optim.schedule.Constant"},
}
READ = ("seed", "allow_targets")  # of the trainer's options
UNREAD = {"batch", "micro_batch", "accumulate", "optimizer", "schedule", "nccl", "tuned"}


@no_folders_if_refused()
def export(checkpoint: str, folder: Path, changes: list[str]) -> None:
    """Build the recipe from the run's config, with `changes` as KEY=VALUE, and call its `export`.

    A run that kept an average exports the average. A config that no run of this user has written may be a stranger's.
    Then code of other packages, and the recipe's `paths`, come from `changes` alone.
    """
    refuse_unread(changes, READ)
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"FOLDER={folder}: holds files, which the export could replace; give a new folder")
    key = f"CHECKPOINT={checkpoint}"
    path = find_checkpoint(checkpoint, key)
    manifest, made = open_run(path, changes, key)
    recipe, seed = made["recipe"], made["options"].seed
    if not hasattr(recipe, "export"):
        raise ConfigError(f"{key}: {type(recipe).__name__} has no method `export`; define it")
    source = open_source(recipe, "train", seed, made["data"])
    refuse_other_data(source, manifest["identity"]["data"], key)
    model = whole_model(path, manifest, made, key)
    make_writable("FOLDER", folder)
    with usual_permissions(folder):
        recipe.export(model.eval(), folder)
    print(f"{path} -> {folder}")


def refuse_unread(changes: list[str], read: Collection[str], flags: Mapping[str, str] | None = None) -> None:
    """Refuse settings of the run that have no effect here, such as those of its steps and checkpoints.

    Args:
        read: The trainer's options that have an effect.
        flags: Flags that replace a setting.
    """
    flags = flags or {}
    unread = UNREAD | {f"trainer.{option.name}" for option in fields(Options) if option.name not in read}
    for change in changes:
        key, _, value = change.partition("=")
        parts = key.split(".")
        if key in flags:
            raise ConfigError(f"{change}: changes nothing here; give {flags[key]} {value}")
        if {parts[0], ".".join(parts[:2])} & unread:
            raise ConfigError(f"{change}: changes nothing here; leave it out")


def open_run(path: Path, changes: list[str], key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the checkpoint's manifest, and the components that its run's config builds, with `changes`.

    Args:
        key: The argument that named the checkpoint, for errors.
    """
    try:
        manifest = verify(path)
    except Damaged as error:
        raise ConfigError(f"{key}: {error}; give runs/NAME, ckpt/last.pt or a whole folder step-*") from None
    refuse_other_manifests(manifest, key)
    config = Path(manifest["run_dir"]) / "config.yaml"
    if not config.exists() and is_run(config.parent):
        raise ConfigError(
            f"{key}: its run has no config.yaml, which a Trainer made in Python does not write; make a Trainer with "
            f"Options(resume='{path}')"
        )
    if not config.exists():
        raise ConfigError(
            f"{key}: its run's {config} is not here; call this in the folder in which the run was started, or give the "
            "run its former name"
        )
    own = is_own(config)
    settings = read_config(config, changes, key, {} if own else UNTRUSTED) | UNTRAINED
    settings["callbacks"] = without_monitors(settings["callbacks"])
    check(settings, ())
    if not own:
        refuse_paths(settings, {change.partition("=")[0] for change in changes})
    return manifest, build_components(settings, ())


def whole_model(path: Path, manifest: dict[str, Any], made: dict[str, Any], key: str) -> nn.Module:
    """Return the model on the CPU, with the checkpoint's weights, or with the average that the run kept."""
    torch.manual_seed(made["options"].seed)
    model = on_host(made["recipe"].model())
    sections = open_parts(path, manifest["files"], manifest["world"])
    state = load_state(path, manifest["files"], "callbacks".__eq__)
    callbacks = sections.get("callbacks", state["callbacks"])
    averages = (average_of(callbacks.get(name)) for name, c in made["callbacks"].items() if c.role is Role.AVERAGE)
    put_weights(model, read_all(next(averages, None) or sections["model"]), key)
    return model


def average_of(state: Any) -> Any:
    """Return the weights in the state of a callback of role AVERAGE: its `average`, or else the state itself."""
    inner = state.get("average") if isinstance(state, dict) else None
    return inner if isinstance(inner, dict) else state


def read_config(file: Path, changes: list[str], key: str, instead: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a run, with some values replaced: first by `instead`, then by `changes`."""
    try:
        refuse_cut(found := OmegaConf.load(stored_config(file)))
        settings: Any = OmegaConf.to_container(OmegaConf.merge(found, instead, OmegaConf.from_dotlist(changes)))
        hidden = redacted_keys(settings)
    except Exception as error:  # YAML's or OmegaConf's
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{key}: {file} can't be read ({reason}); restore the file that the run wrote") from None
    if hidden:
        raise ConfigError(f"{key}: {file} hides {', '.join(hidden)}, a secret; add {hidden[0]}=VALUE")
    return settings


def without_monitors(callbacks: dict[str, Any]) -> dict[str, Any]:
    """Return `callbacks` without monitors: an export needs none, and an older config may name moved modules."""
    names = {module.name for module in pkgutil.iter_modules([*monitors.__path__, *loggers.__path__])}
    target = re.compile(rf"trainer\.\w+\.({'|'.join(names)})(\.\w+)+")
    return {name: node for name, node in callbacks.items() if not target.fullmatch(str(node.get("_target_")))}


def refuse_paths(settings: dict[str, Any], given: Collection[str]) -> None:
    """Refuse those of the recipe's `paths` that the config sets and the command does not."""
    node = settings["recipe"]
    allow = tuple(settings["trainer"]["allow_targets"])
    names = getattr(locate("recipe._target_", node["_target_"], allow), "paths", ())
    paths = {f"recipe.{name}": node.get(name) for name in names}
    words = [f"{key}={printable(str(path))}" for key, path in paths.items() if path is not None and key not in given]
    if words:
        what = "this path; if you trust it" if len(words) == 1 else "these paths; if you trust them"
        add = " ".join(f"'{word}'" for word in words)
        raise ConfigError(f"{', '.join(words)}: the run's config names {what}, add {add}")


def refuse_other_data(source: Any, saved: str, key: str) -> None:
    """Refuse changed data, since a recipe may export a part of the data, such as a tokenizer."""
    own = source.fingerprint
    if own != saved:
        raise ConfigError(
            f"{key}: the data has changed since the training (was {short(saved)}, is {short(own)}); restore the data"
        )


def main() -> int:
    parser = ArgumentParser(prog="echelon export", description=__doc__)
    parser.add_argument("checkpoint", help="runs/NAME, ckpt/last.pt, a run's folder of checkpoints, or a folder step-*")
    parser.add_argument("folder", type=Path, help="the folder to export to")
    parser.add_argument(
        "changes", nargs="*", default=[], metavar="KEY=VALUE", help="replaces a value of the run's config.yaml"
    )
    arguments = parser.parse_args()
    return run_guarded(lambda: export(arguments.checkpoint, arguments.folder, arguments.changes) or 0)


if __name__ == "__main__":
    sys.exit(main())
