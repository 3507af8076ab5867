"""python -m trainer.tools.export CHECKPOINT FOLDER: what the recipe exports at a run's end, from any checkpoint."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from trainer.checkpoint.manifest import Damaged, verify
from trainer.checkpoint.resume import put_weights
from trainer.checkpoint.state import load_state
from trainer.config import check
from trainer.errors import ConfigError, DataError, exit_code
from trainer.run import make_writable
from trainer.session import objects


def export(checkpoint: str, folder: Path) -> None:
    """Builds the recipe from the config in the run's folder; takes the average's weights if the run kept one (`ema`).

    Raises:
        ConfigError: where the checkpoint or its run's config is missing or damaged, the recipe exports nothing or has
            another model by now, or the folder can't be written.
    """
    key, path = f"CHECKPOINT={checkpoint}", Path(os.path.realpath(checkpoint))
    try:
        config = Path(verify(path)["run_dir"]) / "config.yaml"
    except Damaged as error:
        raise ConfigError(f"{key}: {error}; give ckpt/last.pt or a folder step-* that is whole") from None
    if not config.exists():
        raise ConfigError(f"{key}: its run's {config} is not here; call this where the run was started")
    settings: Any = OmegaConf.to_container(OmegaConf.load(config))
    check(settings)
    recipe = objects(settings)["recipe"]
    if not hasattr(recipe, "export"):
        raise ConfigError(f"{key}: {type(recipe).__name__} has no `export`; give the recipe one")
    torch.manual_seed(settings["trainer"]["seed"])
    model = recipe.model()
    state = load_state(path)
    put_weights(model, state["callbacks"].get("ema") or state["model"], key)
    make_writable("FOLDER", folder)
    recipe.export(model.eval(), folder)
    print(f"{path} -> {folder}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.tools.export", description=__doc__)
    parser.add_argument("checkpoint", help="ckpt/last.pt, or a folder step-*")
    parser.add_argument("folder", type=Path, help="where the recipe puts what it exports")
    arguments = parser.parse_args()
    try:
        export(arguments.checkpoint, arguments.folder)
    except (ConfigError, DataError) as error:
        print(f"echelon: {error}", file=sys.stderr)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
