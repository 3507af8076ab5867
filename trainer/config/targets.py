"""Finds the objects that a config may name: those in conf/, and those in allowed packages."""

import difflib
import functools
import importlib
import os
import re
import traceback
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from typing import Any

from trainer.config.folders import CONF, HOME
from trainer.errors import ConfigError, package_of
from trainer.redact import children

LIBRARIES = ("torch.nn", "torch.optim", "transformers")  # packages that a command's config may name
OURS = ("trainer", "recipes")
MOVED = ("loggers", "monitors")  # have callbacks that older versions had in `callbacks` or `monitors`
STAGES = ("trainer.data.images.Augment", "trainer.data.images.LazyJpeg")  # for `data.map` and `data.decoders`
LIMITED = ("torch", "transformers")  # packages with functions and classes that run code which an argument names


@functools.cache
def named_in_conf() -> frozenset[str]:
    """Return the targets that conf/ names, and `STAGES`, which any config may name of Echelon's own code."""
    files = (path.read_text() for path in CONF.glob("*/*.yaml"))
    return frozenset([*STAGES, *(name for text in files for name in re.findall(r"_target_: *([\w.]+)", text))])


def in_conf(target: str) -> str | None:
    """Return the name in conf/ of a target: the same, or a shorter one of the class that the target's module defines.

    `recipes.lightning.recipe.Lightning` is `recipes.lightning.Lightning`; `locate` compares the classes. Configs of
    older runs name modules of `trainer` by the packages that had them.
    """
    for name in (target, *moved(target)):
        module, _, last = name.rpartition(".")
        if name in named_in_conf():
            return name
        shorter = (f"{package}.{last}" for package in accumulate(module.split(".")[:-1], "{}.{}".format))
        if known := next((known for known in shorter if known in named_in_conf()), None):
            return known
    return None


def moved(target: str) -> list[str]:
    now = {re.sub(r"^trainer\.(callbacks|monitors)\.", f"trainer.{package}.", target) for package in MOVED}
    return sorted(now - {target})


def allows(packages: tuple[str, ...], module: str) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def refuse_package(key: str, value: str, module: str, allow: tuple[str, ...]) -> None:
    if allows(allow, module):
        return
    package = module.split(".")[0]
    what = f"{package} is not a package that configs may name"
    if package in OURS:
        if foreign := foreign_package(package):
            raise ConfigError(f"{key}={value}: {foreign}")
        near = difflib.get_close_matches(value, named_in_conf(), 1)
        what = "is not a name that Echelon's conf/ has" + (f"; did you mean {near[0]}?" if near else "")
    given = dict.fromkeys([*(name for name in allow if name not in LIBRARIES), package])
    raise ConfigError(f"{key}={value}: {what}; if you trust it, add 'trainer.allow_targets=[{','.join(given)}]'")


def refuse_target(key: str, target: str, allow: tuple[str, ...]) -> None:
    if in_conf(target) is None:
        refuse_package(key, target, target, allow)


def refuse_nested(key: str, value: Any) -> None:
    """Refuse a `_target_` inside arguments, because the receiver may build it without these checks."""
    if isinstance(value, Mapping) and "_target_" in value:
        raise ConfigError(
            f"{key}._target_={value['_target_']}: a _target_ inside arguments is not built; give a plain value"
        )
    for name, item in children(value):
        refuse_nested(f"{key}.{name}", item)


def locate(key: str, target: str, allow: tuple[str, ...]) -> Callable[..., Any]:
    """Import the object, and check its own package too: a module may have imported the name from elsewhere.

    Every name in a config is imported here, so that nothing is imported without permission.
    """
    refuse_target(key, target, allow)
    known = None if allows(allow, target) else in_conf(target)
    module, _, name = (known or target).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, ValueError, TypeError, AttributeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if not package_of(last.filename) and module.partition(".")[0] not in OURS:  # raised by the user's own module
            if not isinstance(error, ImportError):
                raise
            line = f"{last.filename}:{last.lineno}: {error}"
            raise ConfigError(f"{key}={target}: {line}; install the package, or correct the import") from None
        package = module.partition(".")[0]
        fix = foreign_package(package) or f"{error}; name an importable class or function"
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            fix = f"{error}; go to the folder that has {package}, set PYTHONPATH to it, or install the package"
        raise ConfigError(f"{key}={target}: {fix}") from None
    if target in named_in_conf() or (known and known in moved(target)):
        return found
    if known and f"{found.__module__}.{name}" in (target, *moved(target)):
        return found
    home = getattr(found, "__module__", None) or "builtins"
    refuse_package(key, target, home, allow)
    if home.split(".")[0] in LIMITED:
        refuse_unlimited(key, target, found)
    if home.split(".")[0] == "webdataset":
        secure_webdataset()
        os.environ["WDS_SECURE"] = "1"  # also in data workers that are spawned later
    return found


def refuse_unlimited(key: str, target: str, found: Any) -> None:
    """Refuse all of torch and transformers but public modules and optimizers, which run no given code."""
    from torch import nn, optim

    kinds = (nn.Module, optim.Optimizer)
    private = any(part.startswith("_") for part in target.split("."))
    if private or not (isinstance(found, type) and issubclass(found, kinds)):
        raise ConfigError(
            f"{key}={target}: is not a public nn.Module or Optimizer; call it in your own package's function"
        )


def foreign_package(name: str) -> str:
    """Explain which package or folder conflicts with the name of one of Echelon's; empty if none does."""
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
    """Disable pickle, pipe: and rewritten URLs for all users of webdataset in this process."""
    from webdataset import utils

    utils.enforce_security = True  # pyright: ignore[reportAttributeAccessIssue] it is there
