"""python -m trainer.tools.export CHECKPOINT FOLDER: what the recipe exports at a run's end, from any checkpoint."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from trainer.callback import Role
from trainer.checkpoint.manifest import Damaged, verify
from trainer.checkpoint.resume import put_weights
from trainer.checkpoint.state import load_state
from trainer.config import check
from trainer.data.source import Samples, open_source
from trainer.errors import ConfigError
from trainer.main import guarded
from trainer.options import DataOptions
from trainer.plan import short
from trainer.run import make_writable
from trainer.session import objects


def export(checkpoint: str, folder: Path) -> None:
    """Builds the recipe from the config in the run's folder; takes the average's weights if the run kept one.

    Raises:
        ConfigError: where the checkpoint or its run's config is missing or damaged, the recipe exports nothing or has
            another model or other data by now, or the folder can't be written.
        DataError: where that data can't be opened.
    """
    key, path = f"CHECKPOINT={checkpoint}", Path(os.path.realpath(checkpoint))
    try:
        manifest = verify(path)
    except Damaged as error:
        raise ConfigError(f"{key}: {error}; give ckpt/last.pt or a folder step-* that is whole") from None
    config = Path(manifest["run_dir"]) / "config.yaml"
    if not config.exists():
        raise ConfigError(f"{key}: its run's {config} is not here; call this where the run was started")
    settings: Any = OmegaConf.to_container(OmegaConf.load(config))
    check(settings)
    made = objects(settings)
    recipe, seed = made["recipe"], settings["trainer"]["seed"]
    if not hasattr(recipe, "export"):
        raise ConfigError(f"{key}: {type(recipe).__name__} has no `export`; give the recipe one")
    source = open_source(recipe, "train", seed, DataOptions(**settings["data"]))
    refuse_other_data(source, manifest["identity"]["data"], key)
    torch.manual_seed(seed)
    model = recipe.model()
    state = load_state(path)
    averages = (state["callbacks"].get(name) for name, c in made["callbacks"].items() if c.role is Role.AVERAGE)
    put_weights(model, next(averages, None) or state["model"], key)
    make_writable("FOLDER", folder)
    recipe.export(model.eval(), folder)
    print(f"{path} -> {folder}")


def refuse_other_data(source: Any, saved: str, key: str) -> None:
    """A recipe may export what it made of its data, as a tokenizer."""
    own = source.fingerprint if isinstance(source, Samples) else "iterable"
    if own != saved:
        raise ConfigError(
            f"{key}: its data has changed since (was {short(saved)}, is {short(own)}); "
            "give the data back that it was trained on"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.tools.export", description=__doc__)
    parser.add_argument("checkpoint", help="ckpt/last.pt, or a folder step-*")
    parser.add_argument("folder", type=Path, help="where the recipe puts what it exports")
    arguments = parser.parse_args()
    return guarded(lambda: export(arguments.checkpoint, arguments.folder) or 0)


if __name__ == "__main__":
    sys.exit(main())
