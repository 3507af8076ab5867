"""Loads adapters in peft's format for `trainer.init_from`: a folder without the weights of the base model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainer.checkpoint.serialize import strict_json
from trainer.errors import ConfigError, printable

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
CONFIG_BYTES = 1 << 20
SCALES = ("lora_alpha", "use_rslora", "alpha_pattern")  # factors of the adapters, which no shape reveals


def with_base(module: nn.Module, adapters: Mapping[str, Tensor], folder: Path, key: str) -> dict[str, Tensor]:
    """Return the adapters under the model's names, with the model's own values for all other weights.

    Raises:
        ConfigError: The model has no adapters, or scales them differently. The message begins with `key`.
    """
    config = getattr(module, "peft_config", {}).get("default")
    if config is None:
        raise ConfigError(f"{key}: has adapters, and the model has none; give recipe.lora as in its {CONFIG}")
    refuse_other_scales(folder / CONFIG, config, key)
    from peft import get_peft_model_state_dict  # the model was made by it

    own = module.state_dict()
    name_of = {id(value): name for name, value in own.items()}
    saved: Any = get_peft_model_state_dict(module, own, save_embedding_layers=False)
    names = {name: name_of[id(value)] for name, value in saved.items()}
    trained = set(names.values())
    rest = {name: value for name, value in own.items() if name not in trained}
    return rest | {names.get(name, name): value for name, value in adapters.items()}


def refuse_other_scales(file: Path, config: Any, key: str) -> None:
    try:
        saved = strict_json(file, CONFIG_BYTES)
        was = {name: saved[name] for name in SCALES}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{key}: {file.name}: can't be read ({printable(str(error))}); export it again") from None
    for name, value in was.items():
        if value != (own := getattr(config, name)):
            text = f"{name}={printable(str(value))}, and recipe.lora has {own}"
            raise ConfigError(f"{key}: its adapters were trained with {text}; give recipe.lora.{name} as it was")
