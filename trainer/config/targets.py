"""Finds the objects that `_target_` may name: those of allowed packages."""

import importlib
import os
import traceback
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError, package_of
from trainer.redact import children

# Not all of `trainer`: trainer.config would build any target that its arguments allow.
OWN = ("trainer.callbacks", "trainer.monitors", "trainer.optim", "recipes")
ALLOWED = (*OWN, "torch.nn", "torch.optim", "transformers")
OURS = ("trainer", "recipes")
HOME = Path(__file__).parents[2]
LIMITED = ("torch", "transformers")  # packages with functions and classes that run code which an argument names


def refuse_package(key: str, value: str, module: str, allow: tuple[str, ...]) -> None:
    """Refuse a value that names an object of this module, if no allowed package holds the module."""
    if not any(f"{module}.".startswith(f"{package}.") for package in allow):
        package = module.split(".")[0]
        raise ConfigError(
            f"{key}={value}: {package} is not a package that configs may name; "
            f"if you trust it, add 'trainer.allow_targets=[{package}]'"
        )


def refuse_nested(key: str, value: Any) -> None:
    """Refuse a `_target_` inside arguments: the object that takes it may build it without these checks."""
    if isinstance(value, Mapping) and "_target_" in value:
        raise ConfigError(
            f"{key}._target_={value['_target_']}: a _target_ inside arguments is not built; give a plain value"
        )
    for name, item in children(value):
        refuse_nested(f"{key}.{name}", item)


def locate(key: str, target: str, allow: tuple[str, ...]) -> Callable[..., Any]:
    """Import the object, and check its own package too: a module may have imported the name from elsewhere."""
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, ValueError, TypeError, AttributeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if not package_of(last.filename) and module.partition(".")[0] not in OURS:  # raised by the user's own module
            if not isinstance(error, ImportError):
                raise
            line = f"{last.filename}:{last.lineno}: {error}"
            raise ConfigError(f"{key}._target_={target}: {line}; install the package, or mend the import") from None
        way_out = foreign_package(module.partition(".")[0]) or f"{error}; name an importable class or function"
        raise ConfigError(f"{key}._target_={target}: {way_out}") from None
    home = getattr(found, "__module__", None) or "builtins"
    refuse_package(f"{key}._target_", target, home, allow)
    if home.split(".")[0] in LIMITED:
        refuse_unlimited(key, target, found)
    if home.split(".")[0] == "webdataset":
        secure_webdataset()
        os.environ["WDS_SECURE"] = "1"  # in data workers that are started anew, too
    return found


def refuse_unlimited(key: str, target: str, found: Any) -> None:
    """Refuse all but public modules and optimizers of torch and transformers, whose constructors run no given code."""
    from torch import nn, optim

    kinds = (nn.Module, optim.Optimizer)
    private = any(part.startswith("_") for part in target.split("."))
    if private or not (isinstance(found, type) and issubclass(found, kinds)):
        raise ConfigError(
            f"{key}._target_={target}: is not a public nn.Module or Optimizer; call it in your own package's function"
        )


def foreign_package(name: str) -> str:
    """Return a line about a package or a folder that has the name of one of Echelon's; empty if there is none."""
    spec = PathFinder.find_spec(name) if name in OURS else None
    if spec is None or spec.origin is None:
        return ""
    found, own = Path(spec.origin), HOME / name / "__init__.py"
    if found != own:
        return f"{found} hides Echelon's package {name}; rename it, or start in another folder"
    if name == "recipes" and found.stat().st_size:
        return f"{found} is another package's, installed over Echelon's; give Echelon an environment of its own"
    if (hidden := Path.cwd() / name).is_dir() and not hidden.samefile(own.parent):
        why = "comes later in sys.path" if (hidden / "__init__.py").exists() else "has no __init__.py"
        return f"Echelon's package {name} hides {hidden}, which {why}; rename that folder"
    return ""


def secure_webdataset() -> None:
    """Switch pickle, pipe: and rewritten URLs off for all callers of webdataset in this process."""
    from webdataset import utils

    utils.enforce_security = True  # pyright: ignore[reportAttributeAccessIssue] it is there
