"""Checks of the arguments of recipes."""

import importlib.util

from trainer.errors import ConfigError, require


def check(fine: bool, message: str) -> None:
    """Raise a ConfigError with the message, unless all is fine."""
    if not fine:
        raise ConfigError(message)


def check_transformer(
    hidden: int, layers: int, heads: int, loss_chunks: int, val_fraction: float, **dropouts: float
) -> None:
    """Refuse arguments that a transformer on packed text can't have, and an environment without its packages.

    Raises:
        ConfigError: As above.
    """
    check(
        all(map(importlib.util.find_spec, ("transformers", "tokenizers"))),
        "recipe: needs transformers and tokenizers; pip install 'transformers>=5,<6' 'tokenizers>=0.22,<1'",
    )
    for key, value in (("hidden", hidden), ("layers", layers), ("heads", heads), ("loss_chunks", loss_chunks)):
        require(f"recipe.{key}", value, at_least=1)
    for key, value in dropouts.items():
        check(0 <= value < 1, f"recipe.{key}={value}: must be at least 0, and below 1")
    check(0 < val_fraction <= 0.5, f"recipe.val_fraction={val_fraction}: must be above 0, and at most 0.5")
    check(hidden % heads == 0, f"recipe.heads={heads}: must divide recipe.hidden={hidden}")
