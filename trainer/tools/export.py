"""python -m trainer.tools.export CHECKPOINT FOLDER: what the recipe exports at a run's end, from any checkpoint."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from trainer.checkpoint import commit
from trainer.checkpoint.resume import load_weights
from trainer.checkpoint.state import load_state
from trainer.config import check
from trainer.errors import ConfigError, DataError, exit_code
from trainer.session import objects


def export(checkpoint: str, folder: Path) -> None:
    """Builds the recipe from the config in the run's folder; takes the average's weights if the run kept one (`ema`).

    Raises:
        ConfigError: where the checkpoint or its run's config is missing, or the recipe exports nothing.
    """
    path = commit.resolve(checkpoint, Path(checkpoint).parent, None)
    if path is None:
        raise ConfigError(f"{checkpoint}: no checkpoint; give ckpt/last.pt or a step-XXXXXXXX folder")
    config = Path(commit.verify(path)["run_dir"]) / "config.yaml"
    if not config.exists():
        raise ConfigError(f"{checkpoint}: its run's {config} is not here; call this where the run was started")
    settings: Any = OmegaConf.to_container(OmegaConf.load(config))
    check(settings)
    recipe = objects(settings)["recipe"]
    if not hasattr(recipe, "export"):
        raise ConfigError(f"{checkpoint}: {type(recipe).__name__} has no `export`; give the recipe one")
    torch.manual_seed(settings["trainer"]["seed"])
    model = recipe.model()
    average = load_state(path)["callbacks"].get("ema")
    if average is not None:
        model.load_state_dict(average)
    else:
        load_weights(model, str(path))
    folder.mkdir(parents=True, exist_ok=True)
    recipe.export(model.eval(), folder)
    print(f"{path} -> {folder}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.tools.export", description=__doc__)
    parser.add_argument("checkpoint", help="ckpt/last.pt, a run's folder of checkpoints, or a step-XXXXXXXX")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    try:
        export(arguments.checkpoint, arguments.folder)
    except (ConfigError, DataError) as error:
        print(f"echelon: {error}", file=sys.stderr)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
