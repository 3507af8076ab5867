"""Takes code from the working folder: `recipe=FILE.py:CLASS`, and packages there that a command's config names."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from trainer.annotated import is_node
from trainer.config.check import STAGES, class_arguments
from trainer.config.targets import LIMITED, OURS
from trainer.errors import ConfigError, nearest
from trainer.redact import children

FILE = re.compile(r"\+*recipe=(.+\.py)(?::(\w+))?")
TARGET = "++recipe._target_="
METHODS = {"model", "data", "loss"}


def replace_file(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Replace `recipe=FILE.py[:CLASS]` in a command's arguments with overrides of no recipe in conf/.

    Return the arguments, and override -> what the user typed for it.
    """
    given = [word for word in words if re.match(r"\+*recipe=", word)]
    files = [word for word in given if FILE.fullmatch(word)]
    if not files:
        return words, {}
    if len(given) > 1:
        raise ConfigError(f"{given[1]}: is a second recipe, after {given[0]}; give one")
    typed = {"~recipe": "", f"{TARGET}{target_of(files[0])}": files[0]}
    return [each for word in words for each in (typed if word == files[0] else [word])], typed


def own_name(typed: Iterable[str]) -> str:
    """Return a run's name for a recipe from a file: next_byte for NextByte."""
    target = next((word for word in typed if word.startswith(TARGET)), "").rpartition(".")[2]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", target).lower()


def target_of(word: str) -> str:
    """Return the `_target_` of the recipe that an argument `recipe=FILE.py[:CLASS]` names.

    Raises:
        ConfigError: The file can't be imported from here, or has no such class.
    """
    named: Any = FILE.fullmatch(word)
    file = Path(named[1])
    if not file.is_file():
        raise ConfigError(f"{word}: there is no such file; give the path of a Python file, as in recipe=FILE.py:CLASS")
    try:
        parts = file.resolve().relative_to(Path.cwd().resolve()).with_suffix("").parts
    except ValueError:
        raise ConfigError(f"{word}: is outside of the working folder; cd to the folder that has {file.name}") from None
    if unusable := next((part for part in parts if not part.isidentifier()), None):
        raise ConfigError(f"{word}: {unusable} can't be imported; name files and folders by letters, digits and _")
    if not in_working_folder(parts[0]):
        raise ConfigError(f"{word}: Python imports another {parts[0]} than the one here; rename yours")
    try:
        tree = ast.parse(file.read_bytes(), file)
    except SyntaxError as error:
        raise ConfigError(f"{word}: line {error.lineno}: {error.msg}; correct the code there") from None
    return ".".join((*parts, known(word, tree, named[2]) if named[2] else only_recipe(word, tree)))


def known(word: str, tree: ast.Module, name: str) -> str:
    """Return the name if the module defines or imports it, perhaps under a condition."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    names |= {node.asname or node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    if not names & {name, "*"}:
        raise ConfigError(f"{word}: the file has no {name}; {nearest(name, names)}")
    return name


def only_recipe(word: str, tree: ast.Module) -> str:
    """Return the name of the module's one class with the methods of a recipe."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    found = [node.name for node in classes if {getattr(item, "name", None) for item in node.body} >= METHODS]
    parents = {*found} or imported_from_here(tree)
    found += [node.name for node in classes if parents & {base.id for base in node.bases if isinstance(base, ast.Name)}]
    if len(found) != 1:
        what = f"has {len(found)} recipes: {', '.join(found)}" if found else "has no class with model, data and loss"
        name = (found or [node.name for node in classes] or ["CLASS"])[0]
        raise ConfigError(f"{word}: {what}; name the class, as in {word}:{name}")
    return found[0]


def imported_from_here(tree: ast.Module) -> set[str]:
    """Return the names that a module imports from the working folder: a class may inherit from them."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.level or in_working_folder(str(node.module).partition(".")[0]))
        for alias in node.names
    }


def in_working_folder(package: str) -> bool:
    """Return whether Python imports this top-level package or module from the working folder."""
    spec = PathFinder.find_spec(package)
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    return any(place and Path(place).resolve().parent == Path.cwd().resolve() for place in places)


def trust(config: Mapping[str, Any]) -> None:
    """Add to `trainer.allow_targets` the packages of the working folder that the config names.

    Only for the config of a command: its user has the code here. A stored config lists what its own run has allowed.
    """
    options = config.get("trainer")
    allowed: Any = options.get("allow_targets") if isinstance(options, Mapping) else None
    for target in named(config) if isinstance(allowed, list) else ():
        package, dot, _ = target.partition(".")
        if dot and package.isidentifier() and package not in (*OURS, *LIMITED, *allowed) and in_working_folder(package):
            allowed.append(package)


def named(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of classes and functions in a config."""
    data: Any = config.get("data")
    stages = [data.get(stage) for stage in STAGES] if isinstance(data, Mapping) else []
    yield from (item for stage in stages for _, item in children(stage) if isinstance(item, str))
    pending: list[Any] = [config]
    while pending:
        node = pending.pop()
        if is_node(node) and isinstance(target := node["_target_"], str):
            yield target
            with suppress(SyntaxError):  # the check shows it, with its line
                yield from (value for _, value in class_arguments(node))
        pending += [value for _, value in children(node)]
