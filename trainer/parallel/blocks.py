"""Finds the blocks of a model: the repeated modules that are recomputed, compiled, sharded or staged one by one."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from trainer.errors import ConfigError


def find_blocks(recipe: Any, model: nn.Module, classes: list[str] | None, key: str) -> list[nn.Module]:
    """Return the blocks in the order of the model: those of these `classes`, or `recipe.blocks(model)`.

    Without either, they are the members of the longest `nn.ModuleList`. `key` is the config's key of the classes, for
    errors.
    """
    modules = list(model.modules())
    if classes is None and hasattr(recipe, "blocks"):
        return _checked(recipe.blocks(model), modules)
    if classes is None:
        found = longest_list(model)
    else:
        found = [module for module in modules if type(module).__name__ in classes]
    missing = set(classes or ()) - {type(module).__name__ for module in found}
    if missing or not found:
        names = sorted({type(module).__name__ for module in modules if list(module.children())})
        value = "null" if classes is None else f"[{','.join(classes)}]"
        what = ", ".join(sorted(missing)) or "nn.ModuleList with members"
        raise ConfigError(f"{key}={value}: no {what} in this model, which has {', '.join(names)}")
    return found


def longest_list(model: nn.Module) -> list[nn.Module]:
    return list(max((module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len, default=()))


def _checked(given: Any, modules: list[nn.Module]) -> list[nn.Module]:
    own, blocks = set(map(id, modules)), list(given) if isinstance(given, Iterable) else [given]
    if not blocks or any(id(block) not in own for block in blocks):
        names = ", ".join(type(block).__name__ for block in blocks) or "nothing"
        raise ConfigError(f"recipe.blocks(): returned {names}; return modules of the model that it takes")
    return blocks
