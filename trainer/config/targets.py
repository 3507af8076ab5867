"""What `_target_` may name: packages that are allowed, checked by name before an import and on the object after it."""

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from trainer.errors import ConfigError

# Not all of `trainer`: its config module would build any target that its arguments allow.
OWN = ("trainer.callbacks", "trainer.monitors", "trainer.optim", "recipes")
ALLOWED = (*OWN, "torch.nn", "torch.optim", "transformers")

LIMITED = ("torch", "transformers")  # some of their functions and classes run the code that they are pointed to


def refuse_target(key: str, target: str, module: str, allow: tuple[str, ...]) -> None:
    if not any(f"{module}.".startswith(f"{package}.") for package in allow):
        package = module.split(".")[0]
        raise ConfigError(
            f"{key}._target_={target}: {package} is not a package that configs may name; "
            f"if you trust it, 'trainer.allow_targets=[{package}]'"
        )


def refuse_nested(key: str, value: Any) -> None:
    """Nothing is built inside of arguments: what takes one may build it without these checks."""
    if isinstance(value, Mapping) and "_target_" in value:
        raise ConfigError(f"{key}._target_={value['_target_']}: is inside of arguments; give a plain value")
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        refuse_nested(f"{key}.{name}", item)


def locate(key: str, target: str, allow: tuple[str, ...]) -> Callable[..., Any]:
    """The allowed packages are checked on the object too: a name may lead elsewhere by a module's imports."""
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{key}._target_={target}: {error}; name an importable class or function") from None
    home = getattr(found, "__module__", None) or "builtins"
    refuse_target(key, target, home, allow)
    if home.split(".")[0] in LIMITED:
        refuse_unlimited(key, target, found)
    if home.split(".")[0] == "webdataset":
        make_webdataset_careful()
        os.environ["WDS_SECURE"] = "1"  # in data workers that are started anew, too
    return found


def refuse_unlimited(key: str, target: str, found: Any) -> None:
    """Take public modules and optimizers of torch and transformers only: their constructors import and run nothing."""
    from torch import nn, optim

    kinds = (nn.Module, optim.Optimizer)
    private = any(part.startswith("_") for part in target.split("."))
    if private or not (isinstance(found, type) and issubclass(found, kinds)):
        raise ConfigError(
            f"{key}._target_={target}: is no public nn.Module or Optimizer; call it in a function of your own package"
        )


def make_webdataset_careful() -> None:
    """No pickle, no pipe:, no rewritten URL, for whatever calls it in this process."""
    from webdataset import utils

    utils.enforce_security = True  # pyright: ignore[reportAttributeAccessIssue] it is there
